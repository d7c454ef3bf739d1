"""Whether a tuned plan is where it was tuned."""

from __future__ import annotations

import logging

from autopipe.core.plan import Plan
from autopipe.core.tuned import Machine

_log = logging.getLogger(__name__)


def warn_if_elsewhere(plan: Plan) -> None:
    """Log a warning with the differences if the plan was tuned on another machine, or with other libraries."""
    if plan.tuned is None:
        return
    from autopipe.profile.identity import describe_machine

    found = differences(plan.tuned.machine, describe_machine())
    if found:
        _log.warning(
            "this plan was tuned elsewhere (%s); its output is the same here, its speed may not be: "
            "run `autopipe tune` here",
            "; ".join(found),
        )


def differences(there: Machine, here: Machine) -> list[str]:
    """What is not the same, in words; [] on the same machine.

    Memory counts when it differs by more than 5%: what the system takes for itself changes with every kernel.
    """
    if there.fingerprint == here.fingerprint:
        return []
    found = [
        f"{name}: {then or 'none'} there, {now or 'none'} here"
        for name, then, now in (
            ("platform", there.platform, here.platform),
            ("CPU", there.cpu, here.cpu),
            ("cores", there.cores, here.cores),
            ("GPUs", ", ".join(there.gpus), ", ".join(here.gpus)),
        )
        if then != now
    ]
    if abs(there.memory_bytes - here.memory_bytes) > 0.05 * max(there.memory_bytes, here.memory_bytes):
        found.append(f"memory: {there.memory_bytes / 2**30:.1f} GiB there, {here.memory_bytes / 2**30:.1f} GiB here")
    for name in sorted(there.libraries.keys() | here.libraries.keys()):
        then_version, now_version = there.libraries.get(name), here.libraries.get(name)
        if then_version != now_version:
            found.append(f"{name}: {then_version or 'none'} there, {now_version or 'none'} here")
    return found
