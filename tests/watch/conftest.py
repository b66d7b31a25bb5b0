"""The fixtures of the service: what is watched is what a coordinator looks after."""

from tests.service.conftest import reports as reports
from tests.service.conftest import scratch_dir as scratch_dir
