"""What all sections share: their base, limits and durations."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat

Fraction = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
ThreeFloats = Annotated[list[float], Field(min_length=3, max_length=3)]
ThreePositiveFloats = Annotated[list[PositiveFloat], Field(min_length=3, max_length=3)]


Unit = Literal["steps", "epochs", "samples", "percent", "minutes"]


class Duration(NamedTuple):
    """An amount of training: `value` in `unit` (steps, epochs, samples, percent or minutes)."""

    value: float
    unit: Unit


_UNITS: dict[str, Unit] = {
    "step": "steps",
    "steps": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
    "sample": "samples",
    "samples": "samples",
    "%": "percent",
    "min": "minutes",
    "mins": "minutes",
    "minute": "minutes",
    "minutes": "minutes",
}
_DURATION = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([a-z%]+)\s*")


def parse_duration(text: str) -> Duration:
    """Read `"1000 steps"`, `"3 epochs"`, `"2e6 samples"`, `"5%"` or `"10 min"`.

    Raises:
        ValueError: when the text is none of these.
    """
    match = _DURATION.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f'{text!r} is not a duration; write "1000 steps", "3 epochs", "2e6 samples", "5%", or '
            'for what a clock decides "10 min"'
        )
    try:
        return Duration(float(match[1]), _UNITS[match[2]])
    except ValueError:
        raise ValueError(f"{match[1]!r} in {text!r} is not a number") from None


def _check_duration(text: str) -> str:
    if parse_duration(text).unit == "minutes":
        raise ValueError(f"{text!r}: minutes are allowed only in `every`, since a run must repeat")
    return text


def _check_every(text: str) -> str:
    if parse_duration(text).value <= 0:
        raise ValueError(f"{text!r}: the interval must be above 0")
    return text


def _check_minutes(text: str) -> str:
    if parse_duration(text).unit != "minutes" or parse_duration(text).value <= 0:
        raise ValueError(f'{text!r} is not a time; write minutes above 0, such as "10 min"')
    return text


DurationText = Annotated[str, AfterValidator(_check_duration)]
"""`"1000 steps"`, `"3 epochs"`, `"2e6 samples"` or `"5%"` (of the run)."""
EveryText = Annotated[str, AfterValidator(_check_every)]
"""As a duration, and also `"10 min"`."""
MinutesText = Annotated[str, AfterValidator(_check_minutes)]
"""`"10 min"`."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are read only and not converted."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
