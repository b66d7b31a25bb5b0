"""BenchMARL's independent SAC on either library's replay buffers.

python -m tests.compat.marl

BenchMARL has no setting for the class of its buffers. `CLASSES` takes the place of TorchRL's
classes in the module that makes them. The run "same draws" draws as TorchRL's `RandomSampler`
does, and "shared" keeps the items in a directory, by BenchMARL's setting
``buffer_device="disk"``. The runs "torchrl, prioritized" and "private, prioritized" have
priorities. The last line of the output is JSON: for each run, the losses and a description of the
buffer, or the error that ended the run.

BenchMARL 1.5.1 imports ``SyncDataCollector``, which TorchRL 0.14.1 calls ``Collector``.
"""

# ruff: noqa: E402 - the renamed class has to be there before BenchMARL is imported

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torchrl.collectors

vars(torchrl.collectors).setdefault("SyncDataCollector", torchrl.collectors.Collector)

from benchmarl.algorithms import IsacConfig, common
from benchmarl.environments.common import TaskClass
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

import shmbuffer
from tests.compat.sota import TorchRLDraws, recorded

CLASSES = (
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "PrioritizedSampler",
    "RandomSampler",
    "SamplerWithoutReplacement",
    "TensorDictReplayBuffer",
)
STEPS = 10


class Meeting(EnvBase):
    """Two agents on a line that should meet. The reward of a step is minus their distance."""

    def __init__(self, worlds: int, seed: int, device: Any) -> None:
        super().__init__(device=device, batch_size=[worlds])
        shape = (worlds, 2)

        def agents(**entries: Any) -> Composite:
            return Composite(
                agents=Composite(shape=shape, device=self.device, **entries),
                shape=[worlds],
                device=self.device,
            )

        self.observation_spec = agents(observation=Unbounded((*shape, 2), device=self.device))
        self.action_spec = agents(action=Bounded(-1, 1, (*shape, 1), device=self.device))
        self.reward_spec = agents(reward=Unbounded((*shape, 1), device=self.device))
        self.set_seed(seed)

    def _agents(self, **entries: torch.Tensor) -> TensorDict:
        here, steps = self.places, self.steps
        observation = torch.cat([here, here.flip(1)], -1)
        return TensorDict(
            {
                "agents": TensorDict({"observation": observation, **entries}, here.shape[:2]),
                "done": steps >= STEPS,
                "terminated": torch.zeros_like(steps, dtype=torch.bool),
                "truncated": steps >= STEPS,
            },
            self.batch_size,
        )

    def _reset(self, tensordict: TensorDictBase | None, **_: Any) -> TensorDict:
        places = 2 * torch.rand(*self.batch_size, 2, 1, generator=self.rng_) - 1
        steps = torch.zeros(*self.batch_size, 1, dtype=torch.int64)
        again = None if tensordict is None else tensordict.get("_reset", None)
        if again is not None:
            places = torch.where(again[..., None], places, self.places)
            steps = torch.where(again, steps, self.steps)
        self.places, self.steps = places, steps
        return self._agents()

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        self.places = self.places + 0.2 * tensordict["agents", "action"]
        self.steps = self.steps + 1
        distance = (self.places - self.places.flip(1)).abs()
        return self._agents(reward=-distance)

    def _set_seed(self, seed: int | None) -> None:
        self.rng_ = torch.Generator().manual_seed(seed or 0)


class MeetingTask(TaskClass):
    def get_env_fun(
        self, num_envs: int, continuous_actions: bool, seed: int | None, device: Any
    ) -> Callable[[], EnvBase]:
        return lambda: Meeting(num_envs, seed or 0, device)

    def supports_continuous_actions(self) -> bool:
        return True

    def supports_discrete_actions(self) -> bool:
        return False

    def max_steps(self, env: EnvBase) -> int:
        return STEPS

    def has_render(self, env: EnvBase) -> bool:
        return False

    def group_map(self, env: EnvBase) -> dict[str, list[str]]:
        return {"agents": ["first", "second"]}

    def observation_spec(self, env: EnvBase) -> Composite:
        return env.full_observation_spec_unbatched.clone()

    def action_spec(self, env: EnvBase) -> Composite:
        return env.full_action_spec_unbatched

    def info_spec(self, env: EnvBase) -> None:
        return None

    def state_spec(self, env: EnvBase) -> None:
        return None

    def action_mask_spec(self, env: EnvBase) -> None:
        return None

    @staticmethod
    def env_name() -> str:
        return "meeting"


class Seen(Callback):
    """Stores a description of the buffer, because the experiment closes it."""

    def on_train_end(self, training_td: TensorDictBase, group: str) -> None:
        rb = self.experiment.replay_buffers[group]
        self.found = {
            "items": len(rb),
            "library": type(rb).__module__.partition(".")[0],
            "in a directory": getattr(rb.storage, "scratch_dir", None) is not None,
        }


def trained(run: str, *, prioritized: bool = False) -> dict[str, Any]:
    """Trains for some hundred steps; returns the losses, and a description of the buffer."""
    if run != "torchrl":
        for name in CLASSES:
            setattr(common, name, getattr(shmbuffer, name))
    if run == "same draws":
        common.RandomSampler = TorchRLDraws
    config, seen = ExperimentConfig.get_from_yaml(), Seen()
    config.loggers, config.create_json, config.evaluation = [], False, False
    config.max_n_frames, config.off_policy_collected_frames_per_batch = 400, 40
    config.off_policy_n_envs_per_worker, config.off_policy_n_optimizer_steps = 4, 3
    config.off_policy_train_batch_size, config.off_policy_memory_size = 16, 150
    config.buffer_device = "disk" if run == "shared" else "cpu"
    config.off_policy_use_prioritized_replay_buffer = prioritized
    mlp = MlpConfig(num_cells=[16], activation_class=torch.nn.Tanh, layer_class=torch.nn.Linear)
    with tempfile.TemporaryDirectory() as folder, recorded() as losses:
        config.save_folder = folder
        experiment = Experiment(
            task=MeetingTask("MEETING", {}),
            algorithm_config=IsacConfig.get_from_yaml(),
            model_config=mlp,
            critic_model_config=mlp,
            seed=0,
            config=config,
            callbacks=[seen],
        )
        experiment.run()
    return {"losses": losses, **seen.found}


def error_of(run: str) -> str:
    """Trains with priorities; returns the error that ends the run, or an empty string."""
    try:
        trained(run, prioritized=True)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Runs TorchRL's buffers first, because `trained` replaces their classes for good."""
    found: dict[str, Any] = {"torchrl": trained("torchrl")}
    found["torchrl, prioritized"] = error_of("torchrl")
    found |= {run: trained(run) for run in ("same draws", "private", "shared")}
    found["private, prioritized"] = error_of("private")
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
