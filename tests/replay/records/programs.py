"""What other processes do in these tests. Each runs in a process of its own."""

from __future__ import annotations

from typing import Any

import torch

from tests.replay.records.items import is_item, item, items


def work_on(rb: Any, connection: Any) -> None:
    """Look at what is there, write, change, and look at what the other one wrote."""
    torch.set_num_threads(1)
    seen = [is_item(one, at) for at, one in enumerate(rb[:].unbind(0))]
    rb.extend(items(6, 9))
    rb[0] = item(70, 200)
    connection.send((seen, rb.write_count))
    assert connection.recv() == "written"
    connection.send([int(one["id"]) for one in rb[:].unbind(0)])
    assert all(is_item(one, None, None) for one in rb.sample().unbind(0) if int(one["id"]) != 70)
    rb.close()
