"""The recipe of a run: every fact that decides a byte of its output.

`run.json` keeps the recipe as `facts`, the fingerprint is a digest of it, shards and indexes carry a part of it as
metadata, and jobs take it to the workers. The names of the fields are the names in `facts`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from kimik3_prep.checkpoint.config import Background, PreprocessorConfig
from kimik3_prep.checkpoint.grid import GridRule
from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import InputError, Problem
from kimik3_prep.images.formats import EXTRAS

#: Version of everything on disk. A reader refuses any other.
FORMAT = 1

#: Facts that say which items there are and where they go, and nothing of their bytes.
_OF_THE_RUN = ("manifest", "limit", "backend", "shard_size", "dedupe")

#: The one metadata key of a shard and of an index. Several keys would come out in random order.
METADATA_KEY = "kimik3_prep"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides an item's bytes and its place. Two runs with equal recipes write equal files."""

    config: PreprocessorConfig
    """The preprocessor config."""

    manifest: str
    """Digest of the manifest's rows."""

    limit: int | None
    """Only the first rows of the manifest; null: all."""

    backend: Literal["cpu", "gpu"]
    """For rows that choose none. It decides the shards, never a pixel."""

    dtype: str
    """Storage type of pixel_values."""

    index_only: bool
    """The run writes an index of grids and tokens, and no shards."""

    shard_size: int
    """Most bytes of a shard's patches."""

    dedupe: Literal["path", "content", "off"]
    """Which rows share one stored image."""

    max_pixels: int
    """An image with more pixels fails."""

    max_tokens: int | None
    """An image with more tokens is scaled down; null: as the config says."""

    exif: Literal["ignore", "apply"]
    """What happens to EXIF orientations."""

    decoders: Mapping[str, str] = field(hash=False)
    """Versions of Pillow and of the libraries it decodes with."""

    format: int = FORMAT
    """Version of the files on disk."""

    formats: tuple[str, ...] = ()
    """Formats that packages of their own read as well, sorted. The facts name them only where there are some."""

    # --- as JSON ---

    def facts(self) -> dict[str, Any]:
        """Return the recipe as JSON values, as `run.json` keeps it."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        formats = facts.pop("formats")
        return {
            **facts,
            "config": self.config.to_dict(),
            "decoders": dict(self.decoders),
            **({"formats": list(formats)} if formats else {}),
        }

    @classmethod
    def from_facts(cls, facts: Any, where: str = "facts") -> Recipe:
        """Return the recipe that `facts()` described. Raises InputError that names every odd fact and its place."""
        if problems := list(_problems(facts, where)):
            raise InputError(problems)
        config = PreprocessorConfig.from_dict(facts["config"])
        return cls(**{**facts, "config": config, "formats": tuple(facts.get("formats", ()))})

    @property
    def fingerprint(self) -> str:
        """Digest of the facts: in every shard and index, and what a resumed run is compared by."""
        return fingerprint(self.facts())

    def metadata(self, group: str | None = None, shard: str | None = None) -> dict[str, Any]:
        """Return what the run's indexes and shards say of it under `METADATA_KEY`; a shard adds its group and name."""
        config = self.config.to_dict()
        return {
            "format": self.format,
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            **({"index_only": True} if self.index_only else {}),
            **{name: config[name] for name in ("image_mean", "image_std", "patch_size", "merge_size")},
            **({} if group is None else {"group": group}),
            **({} if shard is None else {"shard": shard}),
        }

    def differences(self, other: Recipe) -> list[tuple[str, Any, Any]]:
        """Return each fact that makes other bytes of an item under the other recipe: its name and both values."""
        return [each for each in differences(self.facts(), other.facts()) if each[0] not in _OF_THE_RUN]

    # --- what follows from it ---

    def rule(self, in_patch_limit: int | None = None) -> GridRule:
        """Return the rule of the grids, for an image whose limit was lowered with that one."""
        rule = self.config.grid_rule()
        return rule if in_patch_limit is None else replace(rule, in_patch_limit=in_patch_limit)

    @property
    def patch_bytes(self) -> int:
        """Bytes of one stored patch, 3 * p * p levels."""
        return 3 * self.config.patch_size**2 * DTYPES[self.dtype].itemsize


def odd_metadata(metadata: Mapping[str, Any]) -> str:
    """Return what is odd about a recipe's part in a shard or an index; empty if nothing is."""
    rules = {**_RULES[PreprocessorConfig], **_RULES[Recipe]}
    names = ("dtype", "index_only", "image_mean", "image_std", "patch_size", "merge_size")
    for name in names:
        if name in metadata and not rules[name].allows(metadata[name]):
            return f"its {name} is {_shown(metadata[name])}, not {rules[name].expected}"
    return ""


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each fact that differs between two recipes' facts, with both values."""
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return the digest of a recipe's facts."""
    return hashlib.sha256(canonical_json(facts).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """Return JSON whose bytes depend on the value alone."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# --- what facts may be ----------------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """What one fact may be, in words and as a test."""

    expected: str
    allows: Callable[[Any], bool]


def _one_of(*values: Any) -> _Rule:
    words = ", ".join(json.dumps(value) for value in values)
    return _Rule(f"one of {words}", lambda value: any(type(value) is type(word) and value == word for word in values))


def _whole(least: int, most: int | None = None) -> _Rule:
    end = "on" if most is None else f"to {most}"
    return _Rule(
        f"a whole number from {least} {end}",
        lambda value: type(value) is int and least <= value and (most is None or value <= most),
    )


def _or_null(rule: _Rule) -> _Rule:
    return _Rule(f"{rule.expected}, or null", lambda value: value is None or rule.allows(value))


def _three(least: float) -> _Rule:
    """Three finite numbers above `least`."""

    def allows(value: Any) -> bool:
        numbers = value if type(value) is list else []
        finite = [number for number in numbers if type(number) in (int, float) and math.isfinite(number)]
        return len(numbers) == len(finite) == 3 and min(finite) > least

    return _Rule("three finite numbers" + (" above 0" if least == 0 else ""), allows)


_TEXT = _Rule("a text", lambda value: type(value) is str)
_COUNT = _whole(1, 2**31 - 1)
_FLAG = _Rule("true or false", lambda value: type(value) is bool)
_VERSIONS = _Rule(
    "an object of texts", lambda value: type(value) is dict and all(type(text) is str for text in value.values())
)
_OBJECT = _Rule("an object", lambda value: type(value) is dict)

#: The one fact that is absent where there is nothing to say.
_FORMATS = _Rule(
    f"some of {', '.join(EXTRAS)}, sorted",
    lambda value: type(value) is list and value == [name for name in sorted(EXTRAS) if name in value] != [],
)

#: One rule for each field of `Recipe`, of `PreprocessorConfig` and of `Background`.
_RULES: dict[type, dict[str, _Rule]] = {
    Recipe: {
        "config": _OBJECT,
        "manifest": _TEXT,
        "limit": _or_null(_whole(1)),
        "backend": _one_of("cpu", "gpu"),
        "dtype": _one_of(*DTYPES),
        "index_only": _FLAG,
        "shard_size": _whole(1),
        "dedupe": _one_of("path", "content", "off"),
        "max_pixels": _whole(1),
        "max_tokens": _or_null(_whole(1)),
        "exif": _one_of("ignore", "apply"),
        "decoders": _VERSIONS,
        "format": _one_of(FORMAT),
        "formats": _FORMATS,
    },
    PreprocessorConfig: {
        **dict.fromkeys(("patch_size", "merge_size", "in_patch_limit", "patch_limit_on_one_side"), _COUNT),
        "image_mean": _three(-math.inf),
        "image_std": _three(0),
        "fixed_output_tokens": _or_null(_COUNT),
        "background": _or_null(_OBJECT),
        "fill_stage": _one_of("before_resize", "after_resize"),
    },
    Background: {
        "pattern": _one_of("white", "black", "gray", "chessboard"),
        "square_size": _COUNT,
        "square_on_top_left": _FLAG,
        "white_value": _whole(0, 255),
        "gray_value": _whole(0, 255),
    },
}


def _problems(facts: Any, where: str) -> Iterator[Problem]:
    """Everything odd about the facts."""
    yield from _odd(Recipe, facts, where)
    config = facts.get("config") if isinstance(facts, dict) else None
    if isinstance(config, dict):
        yield from _odd(PreprocessorConfig, config, f"{where}.config")
        if isinstance(config.get("background"), dict):
            yield from _odd(Background, config["background"], f"{where}.config.background")


def _odd(kind: type, values: Any, where: str) -> Iterator[Problem]:
    """Missing, unknown and wrong values of one object."""
    if not isinstance(values, dict):
        yield Problem(where, f"is {_shown(values)}", "an object")
        return
    rules = _RULES[kind]
    for name in sorted(values.keys() - rules.keys()):
        yield Problem(where, f"has {_shown(name)}, which is no part of a recipe", ", ".join(rules))
    for name, rule in rules.items():
        if name not in values and rule is not _FORMATS:
            yield Problem(f"{where}.{name}", "is missing", rule.expected)
        elif name in values and not rule.allows(values[name]):
            yield Problem(f"{where}.{name}", f"is {_shown(values[name])}", rule.expected)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
