"""Compare what is installed with what this package asks for in its own metadata."""

import re
from collections.abc import Mapping

from replicator.cli.checks.finding import Finding

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)([^;]*?)\s*(?:;\s*(.*))?$")
_LIMIT = re.compile(r"(>=|<|==)\s*([0-9][0-9.]*)")
_EXTRA = re.compile(r"extra == [\"']([^\"']+)[\"']")
# Extras for those who work on the package itself, and the sum of the others.
_OF_NO_RUN = frozenset({"all", "experiments", "test", "dev"})


def check_python(found: str, *, wanted: str) -> Finding:
    """Compare Python's version with `wanted`, such as `>=3.11`."""
    if satisfies(found, wanted):
        return Finding(name="Python", status="ok", detail=found)
    return Finding(
        name="Python",
        status="fail",
        detail=f"{found}, needs {wanted}",
        remedy="Make a virtual environment with a newer Python.",
    )


def check_package(requirement: str, installed: Mapping[str, str]) -> Finding | None:
    """Compare one requirement with what is installed.

    Args:
      requirement: As in a wheel's metadata: `flax>=0.12; extra == "nnx"`.
      installed: Versions by lower-case name.

    Returns:
      What was found; None for a requirement that no run has.
    """
    name, limits, extra = parse_requirement(requirement)
    if extra in _OF_NO_RUN:
        return None
    found = installed.get(name.lower())
    if found is None and extra is not None:
        detail = f"not installed (it is optional: extra `{extra}`)"
        return Finding(name=name, status="ok", detail=detail)
    if found is not None and satisfies(found, limits):
        return Finding(name=name, status="ok", detail=found)
    return Finding(
        name=name,
        status="fail",
        detail=f"{found or 'not installed'}, needs {limits}",
        remedy=f"Run `pip install '{name}{limits}'`.",
    )


def check_jaxlib(jax: str, installed: Mapping[str, str]) -> Finding:
    """Compare jaxlib and the plugins for accelerators with jax: they go together."""
    parts = {
        name: version
        for name, version in sorted(installed.items())
        if name == "jaxlib" or re.fullmatch(r"jax-(cuda|rocm)\d+-(plugin|pjrt)", name)
    }
    odd = [name for name, version in parts.items() if version != jax]
    detail = ", ".join(f"{name} {version}" for name, version in parts.items())
    if not odd:
        return Finding(name="jaxlib", status="ok", detail=detail)
    remedy = " ".join(f"{name}=={jax}" for name in odd)
    return Finding(
        name="jaxlib",
        status="warn",
        detail=f"{detail}; jax is {jax}",
        remedy=f"Run `pip install {remedy}`.",
    )


def parse_requirement(requirement: str) -> tuple[str, str, str | None]:
    """Split a requirement into name, version limits and extra."""
    match = _REQUIREMENT.match(requirement)
    if match is None:
        return requirement, "", None
    extra = _EXTRA.search(match[3] or "")
    return match[1], match[2].strip(), extra[1] if extra else None


def satisfies(version: str, limits: str) -> bool:
    """Tell whether a version is within limits such as `>=0.10,<0.13`.

    Understands what our own metadata uses: `>=`, `<` and `==` with plain numbers.
    """
    found = _numbers(version)
    for operator, limit in _LIMIT.findall(limits):
        wanted = _numbers(limit)
        fits = {">=": found >= wanted, "<": found < wanted, "==": found == wanted}
        if not fits[operator]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:  # 1.0 is 1
        numbers.pop()
    return tuple(numbers)
