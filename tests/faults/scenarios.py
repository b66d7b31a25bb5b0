"""All scenarios that the memory floor runs on files, by name."""

from __future__ import annotations

from tests.faults import holding, joining, serving, upkeep
from tests.faults.scenario import Scenario

SCENARIOS: dict[str, type[Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        joining.Create,
        joining.Define,
        joining.Undefine,
        joining.DefineAndDie,
        joining.Adopt,
        joining.Attach,
        joining.Meet,
        upkeep.Recover,
        upkeep.RecoverCopy,
        upkeep.Flush,
        upkeep.Dictionary,
        upkeep.PublishFirst,
        upkeep.Publish,
        upkeep.ChangeSettings,
        joining.Close,
        upkeep.Remove,
        upkeep.Overwrite,
        upkeep.Temporary,
        upkeep.Sweep,
        upkeep.TakeOver,
        upkeep.Check,
        upkeep.CheckDead,
        upkeep.Inspect,
        upkeep.Record,
        upkeep.RecordFirst,
        holding.Hold,
        holding.Pieces,
        holding.Grow,
        serving.Lead,
        serving.Spawn,
        serving.Stop,
        serving.Wait,
        serving.Look,
        serving.RecoverRecorded,
        serving.AnonymousShared,
        joining.Use,
        joining.UseAfterFork,
        joining.Anonymous,
    )
}
