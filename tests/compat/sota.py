"""Runs a training script from TorchRL's wheel on either library's replay buffers.

python -m tests.compat.sota PROGRAM

The script's folder is copied and gets a small configuration, because the wheel contains none. The
script then runs as ``__main__`` three times. The last line of the output is JSON. For each run, it
has the exact losses that were differentiated, or the error that ended the run.

- "torchrl": unchanged, but for ``prefetch=0``. TorchRL prefetches in threads, which draw from one
  generator in an order that no seed decides.
- "same draws": the same on shmbuffer, by `IMPORT` behind the imports of the file that makes the
  buffer. One more line gives the buffer a sampler that draws as TorchRL's `RandomSampler` does.
- "shipped": on shmbuffer by `IMPORT` alone, with the script's own ``prefetch``, and with priorities
  where it has them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import shmbuffer

# docs/programs.md shows this import. A script that uses fewer names ignores the others.
IMPORT = """\
from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
"""
# The entries that most scripts read; some of them leave a few unread.
SETTINGS: dict[str, Any] = {
    "env": {
        "name": "Pendulum-v1",
        "task": "",
        "library": "gymnasium",
        "backend": "gymnasium",
        "seed": 42,
        "max_episode_steps": 50,
        "train_num_envs": 1,
        "eval_num_envs": 1,
    },
    "collector": {
        "device": "cpu",
        "total_frames": 300,
        "frames_per_batch": 50,
        "init_random_frames": 100,
        "max_frames_per_traj": 50,
        "reset_at_each_iter": False,
        "env_per_collector": 1,
        "eps_start": 1.0,
        "eps_end": 0.1,
        "annealing_frames": 200,
    },
    "replay_buffer": {"size": 250, "scratch_dir": None},
    "optim": {
        "device": "cpu",
        "batch_size": 16,
        "utd_ratio": 0.1,
        "gradient_steps": 10,
        "lr": 3e-4,
        "actor_lr": 3e-4,
        "critic_lr": 3e-4,
        "weight_decay": 0.0,
        "adam_eps": 1e-8,
        "gamma": 0.99,
        "loss_function": "l2",
        "target_update_polyak": 0.995,
        "alpha_init": 1.0,
        "policy_update_delay": 2,
        "policy_noise": 0.2,
        "noise_clip": 0.5,
        "target_entropy_weight": 0.2,
        "beta1": 0.5,
        "beta2": 0.999,
    },
    "network": {
        "device": "cpu",
        "hidden_sizes": [32, 32],
        "actor_hidden_sizes": [32, 32],
        "critic_hidden_sizes": [32, 32],
        "activation": "relu",
        "actor_activation": "relu",
        "critic_activation": "relu",
        "default_policy_scale": 1.0,
        "scale_lb": 0.1,
        "noise_type": "gaussian",
        "batch_norm_momentum": 0.01,
        "warmup_steps": 10,
    },
    "compile": {"compile": False, "compile_mode": None, "cudagraphs": False},
    "logger": {
        "backend": "",
        "exp_name": "test",
        "project_name": "",
        "group_name": None,
        "mode": "offline",
        "video": False,
        "eval_iter": 200,
        "log_interval": 200,
        "eval_steps": 50,
        "eval_envs": 1,
        "num_eval_envs": 1,
    },
}
MODEL = {"activation": "relu", "hidden_sizes": [32, 32], "default_policy_scale": 1.0}
MODEL["scale_lb"] = 0.1
DISCRETE = {"env": {"name": "CartPole-v1"}}


@dataclass
class Script:
    """A script of the wheel, and the changes with which it runs here.

    Attributes:
        path: below the folder of scripts.
        makes_buffer: the file that gets `IMPORT`.
        config: name of the configuration that it asks for.
        settings: entries of that configuration, beside `SETTINGS`.
        prioritized: ``replay_buffer.prb`` gives it priorities.
        seeded: for a script that seeds no environment: a file, and the line before which it does so
            here.
    """

    path: str
    makes_buffer: str = "utils.py"
    config: str = "config"
    settings: dict[str, Any] = field(default_factory=dict)
    prioritized: bool = True
    seeded: tuple[str, str] | None = None


CQL = {
    "loss_function": "l2",
    "temperature": 1.0,
    "min_q_weight": 1.0,
    "max_q_backup": False,
    "deterministic_backup": False,
    "num_random": 4,
    "with_lagrange": True,
    "lagrange_thresh": 10.0,
    "gamma": 0.99,
    "tau": 0.005,
}
IQL = {"loss_function": "l2", "gamma": 0.99, "tau": 0.005, "expectile": 0.5, "temperature": 1.0}
IQL["hard_update_interval"] = 10
SCRIPTS = {
    "sac": Script("sac/sac.py"),
    "td3": Script("td3/td3.py"),
    "ddpg": Script("ddpg/ddpg.py"),
    "discrete_sac": Script("discrete_sac/discrete_sac.py", settings=DISCRETE),
    "cql": Script(
        "cql/cql_online.py", config="online_config", settings={"loss": CQL, "model": MODEL}
    ),
    "discrete_cql": Script(
        "cql/discrete_cql_online.py",
        config="discrete_online_config",
        settings={**DISCRETE, "loss": {**CQL, "action_space": "one-hot"}, "model": MODEL},
    ),
    "iql": Script(
        "iql/iql_online.py", config="online_config", settings={"loss": IQL, "model": MODEL}
    ),
    "discrete_iql": Script(
        "iql/discrete_iql.py",
        config="discrete_iql",
        settings={**DISCRETE, "loss": IQL, "model": MODEL},
    ),
    "crossq": Script("crossq/crossq.py"),
    "tqc": Script(
        "tqc/tqc.py",
        settings={
            "loss": {"num_quantiles": 5, "num_qvalue_nets": 2, "top_quantiles_to_drop_per_net": 1}
        },
    ),
    "dqn": Script(
        "dqn/dqn_cartpole.py",
        makes_buffer="dqn_cartpole.py",
        config="config_cartpole",
        settings={
            "device": "cpu",
            "env": {"env_name": "CartPole-v1"},
            "buffer": {"buffer_size": 250, "batch_size": 16},
            "loss": {"gamma": 0.99, "hard_update_freq": 20, "num_updates": 5},
            "logger": {"test_interval": 200, "num_test_episodes": 1},
            "checkpoint": {
                "path": "checkpoint",
                "format": "directory",
                "strict": "error",
                "resume": False,
                "interval": 200,
            },
        },
        prioritized=False,
        seeded=("utils_cartpole.py", "    env = TransformedEnv(env)\n"),
    ),
    "dqn_atari": Script(
        "dqn/dqn_atari.py",
        makes_buffer="dqn_atari.py",
        config="config_atari",
        settings={
            "device": "cpu",
            "env": {"env_name": "ALE/Pong-v5"},
            # The script divides all counts of frames by four.
            "collector": {
                "total_frames": 400,
                "frames_per_batch": 80,
                "init_random_frames": 80,
                "annealing_frames": 400,
            },
            "buffer": {"buffer_size": 60, "batch_size": 4, "scratch_dir": None},
            "loss": {"gamma": 0.99, "hard_update_freq": 4, "num_updates": 5},
            "optim": {"max_grad_norm": 10},
            "logger": {"test_interval": 10_000, "num_test_episodes": 1},
        },
        prioritized=False,
        seeded=("utils_atari.py", "    env = TransformedEnv(env)\n"),
    ),
    "redq": Script(
        "redq/redq.py",
        settings={
            "seed": 0,
            "num_workers": 1,
            "env": {
                "library": "gym",
                "frame_skip": 1,
                "reward_scaling": 1.0,
                "reward_loc": 0.0,
                "vecnorm": False,
                "norm_stats": True,
                "norm_rewards": False,
                "normalize_rewards_online": False,
                "from_pixels": False,
                "init_env_steps": 10,
                "categorical_action_encoding": False,
                "batch_transform": True,
                "noops": 0,
                "catframes": 0,
                "center_crop": [],
            },
            "collector": {
                "async_collection": False,
                "multi_step": True,
                "n_steps_return": 3,
                "max_frames_per_traj": 0,
            },
            "exploration": {
                "gSDE": False,
                "noisy": False,
                "ou_exploration": True,
                "ou_sigma": 0.2,
                "ou_theta": 0.15,
                "annealing_frames": 200,
            },
            "buffer": {"size": 250, "batch_size": 16, "sub_traj_len": -1, "scratch_dir": None},
            "loss": {
                "type": "double",
                "loss_function": "l2",
                "num_q_values": 4,
                "gamma": 0.99,
                "hard_update": False,
                "value_network_update_interval": 20,
            },
            "network": {
                "actor_cells": 32,
                "actor_depth": 1,
                "qvalue_cells": 32,
                "qvalue_depth": 1,
                "activation": "tanh",
                "tanh_loc": False,
            },
            "optim": {
                "optimizer": "adam",
                "eps": 1e-8,
                "kwargs": {},
                "lr_scheduler": "",
                "steps_per_batch": 5,
                "clip_grad_norm": True,
                "clip_norm": 10.0,
            },
            "logger": {
                "record_frames": 10,
                "record_interval": 1000,
                "recorder_log_keys": None,
            },
        },
        seeded=("utils.py", "        if cfg.env.noops and custom_env is None:\n"),
    ),
}


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merges two dicts of settings; entries of the second dict take precedence."""
    found = dict(one)
    for key, value in other.items():
        inside = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if inside else value
    return found


class TorchRLDraws(shmbuffer.Sampler):
    """Draws with replacement as ``torchrl.data.RandomSampler`` does, from the default generator."""

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        return torch.randint(0, len(storage), (batch_size,)), {}


SAME_DRAWS = (
    "import functools, tests.compat.sota; RandomSampler = tests.compat.sota.TorchRLDraws; "
    "TensorDictReplayBuffer = functools.partial(TensorDictReplayBuffer, sampler=RandomSampler())"
)


def prepare(script: Script, run: str, folder: Path) -> Path:
    """Copies the script's folder; returns the path of the script, which is ready to run."""
    shipped = Path(torch.__file__).parents[1] / "sota-implementations"
    shutil.copytree((shipped / script.path).parent, folder, dirs_exist_ok=True)
    settings = merged(SETTINGS, script.settings)
    for part in ("replay_buffer", "buffer"):
        settings.setdefault(part, {})["prb"] = run == "shipped" and script.prioritized
        settings[part]["prefetch"] = 3 if run == "shipped" else 0
    (folder / f"{script.config}.yaml").write_text(json.dumps(settings))
    path, file = folder / Path(script.path).name, folder / script.makes_buffer
    if script.seeded is not None:
        name, line = script.seeded
        seeded = (folder / name).read_text()
        assert seeded.count(line) == 1
        indent = line[: -len(line.lstrip())]
        (folder / name).write_text(seeded.replace(line, f"{indent}env.set_seed(0)\n{line}"))
    text = file.read_text()
    if run != "shipped":
        text = re.sub(r"\b(prefetch(?:: int)? ?= ?)3\b", r"\g<1>0", text)
    if run != "torchrl":
        lines, imports = text.splitlines(), (ast.Import, ast.ImportFrom)
        last = [one for one in ast.parse(text).body if isinstance(one, imports)][-1]
        lines[last.end_lineno : last.end_lineno] = [IMPORT] + [SAME_DRAWS] * (run != "shipped")
        text = "\n".join(lines)
    file.write_text(text)
    return path


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Records the losses that are differentiated inside the block, in hexadecimal digits."""
    losses: list[str] = []
    backward = torch.Tensor.backward

    def record(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(float(self.detach().sum()).hex())
        backward(self, *args, **kwargs)

    torch.Tensor.backward = record  # type: ignore[method-assign]
    try:
        yield losses
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]


def losses_of(script: Script, run: str) -> list[str] | str:
    """Returns the losses of one run, or its error."""
    here, modules, path = os.getcwd(), {*sys.modules}, [*sys.path]
    with tempfile.TemporaryDirectory() as folder, recorded() as losses:
        file = prepare(script, run, Path(folder))
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.argv = [str(file), "hydra.run.dir=.", "hydra.output_subdir=null"]
        torch.manual_seed(0)
        # discrete_sac.py removes its temporary directory before the storage writes to it for the
        # first time. The storage creates the directory again, and the script does not remove it.
        tempfile.tempdir = folder
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit:  # hydra has printed the original error
            return "failed"
        finally:
            tempfile.tempdir = None
            os.chdir(here)
            sys.path[:] = path
            for name in {*sys.modules} - modules:
                if getattr(sys.modules[name], "__file__", None) in map(str, Path(folder).iterdir()):
                    del sys.modules[name]
        return losses


def main(name: str) -> None:
    """Runs a script from the table."""
    torch.set_num_threads(1)
    runs = ("torchrl", "same draws", "shipped")
    print(json.dumps({run: losses_of(SCRIPTS[name], run) for run in runs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
