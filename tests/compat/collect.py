"""A script in TorchRL's manner with collector processes and a learner, on either library.

python -m tests.compat.collect {sync,async} {torchrl,shmbuffer} STORAGE [shared_init]
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvCreator, GymEnv, StepCounter, TransformedEnv

FRAMES = 400


def make_env() -> Any:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter())


def main(kind: str, library: str, storage: str, *options: str) -> None:
    family: Any = importlib.import_module("torchrl.data" if library == "torchrl" else library)
    rb = family.TensorDictReplayBuffer(
        storage=getattr(family, storage)(1000, **dict.fromkeys(options, True)),
        batch_size=32,
        shared=True,
    )
    make = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}[kind]
    env = EnvCreator(make_env)
    collector = make(
        [env, env], policy=None, total_frames=FRAMES, frames_per_batch=100, replay_buffer=rb
    )
    sampled = 0
    for _ in collector:
        sampled += len(rb.sample()) if len(rb) >= 32 else 0
    keys = sorted(
        ".".join([key] if isinstance(key, str) else key) for key in rb[:].keys(True, True)
    )
    collector.shutdown()
    print(json.dumps({"len": len(rb), "sampled": sampled > 0, "keys": keys}))


if __name__ == "__main__":
    main(*sys.argv[1:])
