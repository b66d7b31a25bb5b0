"""The fixtures of the service, because these tests watch a coordinator's directory."""

from tests.service.conftest import reports as reports
from tests.service.conftest import scratch_dir as scratch_dir
