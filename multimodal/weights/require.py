"""What another format can hold: a table of settings, and the list of what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from multimodal import config

Needed = Mapping[str, Mapping[str, tuple]]
"""Part of a model's section ("" for itself) to setting to allowed values."""


def misfits(section: config.Model, needed: Needed) -> list[str]:
    """The settings that are not among the allowed values, each with those."""
    return [
        f"model.{f'{part}.' if part else ''}{name}={value!r} (needed {_either(allowed)})"
        for part, settings in needed.items()
        for name, allowed in settings.items()
        if (value := getattr(getattr(section, part) if part else section, name, None))
        not in allowed
    ]


def require(section: config.Model, needed: Needed, target: str) -> None:
    """Refuse settings that a format does not have.

    Args:
        section: our settings.
        needed: what the format has.
        target: the format, for the message.

    Raises:
        ValueError: listing all settings at fault.
    """
    refuse(misfits(section, needed), target)


def refuse(wrong: list[str], target: str) -> None:
    """Raise a ValueError with all that is wrong, if anything is."""
    if wrong:
        raise ValueError(f"{target} cannot be this model: {'; '.join(wrong)}")


def _either(values: Iterable[object]) -> str:
    return " or ".join(repr(value) for value in values)
