from __future__ import annotations

import time
from pathlib import Path

import pytest

from common.links import LinkEmulator, wait_until
from common.spec import ClusterSpec

MB = 1_000_000


def test_two_openers_share_one_link(three_sites: ClusterSpec, tmp_path: Path) -> None:
    """east-a - west carries 0.1 Gb/s: 1 MB takes 80 ms, and the second message, by another opener, queues behind."""
    first, second = (LinkEmulator(three_sites, tmp_path / "links") for _ in range(2))
    start_s = time.monotonic()
    arrivals = [first.reserve("east-a", "west", MB), second.reserve("east-a", "west", MB)]
    booked_within_s = time.monotonic() - start_s
    assert arrivals[0] - start_s == pytest.approx(0.080 + 0.030, abs=booked_within_s)
    assert arrivals[1] - arrivals[0] == pytest.approx(0.080, abs=1e-9)
    assert second.traffic()["east-a->west"] == {"bytes": 2 * MB, "messages": 2}
    assert second.traffic()["west->east-a"] == {"bytes": 0, "messages": 0}


def test_off_and_inside_a_site_nothing_is_booked(three_sites: ClusterSpec, tmp_path: Path) -> None:
    links = LinkEmulator(three_sites, tmp_path / "links")
    assert links.reserve("west", "west", MB) <= time.monotonic()
    links.mode = "off"
    assert links.reserve("east-a", "west", MB) <= time.monotonic()
    assert all(count["bytes"] == 0 for count in links.traffic().values())


def test_wait_until_never_returns_early() -> None:
    for ahead_s in (0.0, 0.0002, 0.003):
        target_s = time.monotonic() + ahead_s
        wait_until(target_s)
        assert time.monotonic() >= target_s
