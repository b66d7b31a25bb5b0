"""Scenarios that behave wrongly after a fault, each in a different way, to test the checks."""

from __future__ import annotations

import os
import signal

from tests.faults.joining import Create
from tests.faults.scenario import Scenario


class LeaksADescriptor(Create):
    def act(self) -> None:
        try:
            super().act()
        except OSError:
            os.open(self.folder, os.O_RDONLY)
            raise


class LeaksAFile(Create):
    def act(self) -> None:
        try:
            super().act()
        except OSError:
            (self.folder / "left").touch()
            raise


class SaysSomethingElse(Create):
    def act(self) -> None:
        try:
            super().act()
        except OSError as error:
            raise ValueError("no") from error


class SaysNotWhere(Create):
    def act(self) -> None:
        try:
            super().act()
        except OSError as error:
            raise OSError(error.errno, error.strerror) from error


class SaysNothing(Create):
    def act(self) -> None:
        try:
            super().act()
        except OSError:
            self.engine = self.keep(self.open())


class StaysBroken(Create):
    def act(self) -> None:
        if hasattr(self, "failed"):
            raise RuntimeError("once it has failed it fails")
        try:
            super().act()
        except OSError:
            self.failed = True
            raise


class Crashes(Create):
    def act(self) -> None:
        try:
            super().act()
        except OSError:
            os.kill(os.getpid(), signal.SIGSEGV)


#: Maps each scenario to the message of the check that must notice it.
SCENARIOS: dict[type[Scenario], str] = {
    LeaksADescriptor: "are left: ['descriptor of ",
    LeaksAFile: "these were left: ['left']",
    SaysSomethingElse: "ValueError is not for the caller",
    SaysNotWhere: "it does not say where",
    SaysNothing: "nobody heard of it",
    StaysBroken: "once it has failed it fails",
    Crashes: "the process ended with -11",
}
