"""A slow link on one machine: ranks in a network namespace of their own, behind a token bucket.

    enter_namespace()                  # runs this script again, in a namespace
    set_rate("1gbit")                  # of the loopback that all ranks share

Needs Linux with `unshare`, `ip` and `tc`, and root or user namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys

INSIDE = "SLOW_LINK_NAMESPACE"

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def enter_namespace() -> None:
    """Replace this process by one that runs the same command where loopback can be shaped."""
    if INSIDE in os.environ:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    options = ["--net"] if os.geteuid() == 0 else ["--net", "--map-root-user"]
    environment = {**os.environ, INSIDE: "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["unshare", *options, sys.executable, *sys.argv]
    os.execvpe("unshare", command, environment)


def set_rate(rate: str | None) -> None:
    """Let loopback carry so much per second in all, as `tc` writes it; None is what it can."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True)
    if rate is None:
        return
    # Bursts of some segments, and a queue that drops nothing.
    bucket = ["tbf", "rate", rate, "burst", "512kb", "limit", "256mb"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *bucket], check=True)


def bytes_per_second(rate: str) -> float:
    """Read a rate as `tc` writes it."""
    unit = next(unit for unit in UNITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * UNITS[unit] / 8
