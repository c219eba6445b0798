"""A copy of a config with its keys mended: misspelt ones get their names, missing ones the published values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimik3_prep import strict_json
from kimik3_prep.checkpoint import rules
from kimik3_prep.checkpoint.config import PUBLISHED, Diagnosis, Mended, published_values, read_config
from kimik3_prep.errors import InputError, Problem


def write_fixed_copy(diagnosis: Diagnosis, target: Path) -> Mended:
    """Write a copy of the config with its keys mended, and return what was mended.

    A key that is probably misspelt keeps its value under the right name. A missing key is taken from beside
    `media_proc_cfg`, or has the published value. No other value changes. Nothing is written where nothing is to mend.

    Raises InputError where the copy would still be wrong, for a config of another model, and for a file that exists.
    """
    name = str(diagnosis.path)
    try:
        document = strict_json.parse(read_config(diagnosis.path), name)
    except strict_json.JsonProblem as error:
        raise InputError([error.problem]) from None
    cfg = rules.inner(document)
    if cfg is None or rules.relative_of(document) is not None:
        hint = f"start from --config {PUBLISHED}"
        raise InputError([*diagnosis.errors, Problem(name, "no Kimi-K3 config to mend", hint=hint)])
    mended = _mend(document, cfg, name)
    if not mended.restored and not mended.renamed:
        return mended
    checker = rules.Checker(name, published_values())
    checker.check(document)
    if errors := [problem for problem in checker.problems if problem.severity == "error"]:
        what = "no copy was written: with its keys mended it would still be wrong"
        raise InputError([Problem(str(target), what, hint="mend these by hand first"), *errors])
    _write(target, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return mended


def _mend(document: dict[str, Any], cfg: dict[str, Any], name: str) -> Mended:
    """Mend the settings in place."""
    renamed = _rename(cfg, rules.RESTORED, name)
    background = cfg.get("transparent_bg_config")
    if isinstance(background, dict):
        renamed |= _rename(background, tuple(rules.BACKGROUND_DEFAULTS), name)
    restored = tuple(key for key in rules.RESTORED if key not in cfg)
    values = _values(document, name, restored)
    cfg.update({key: values[key] for key in restored})
    return Mended(restored, renamed)


def _rename(values: dict[str, Any], wanted: tuple[str, ...], name: str) -> dict[str, str]:
    """Give misspelt keys the names of wanted ones that are absent. Raises InputError where two are meant to be one."""
    absent = tuple(key for key in wanted if key not in values)
    unknown = [key for key in values if key not in published_values()][: rules.MOST_GUESSES]
    renamed = {key: meant for key in unknown if (meant := rules.near_miss(key, absent))}
    for meant in set(renamed.values()):
        claims = [key for key in renamed if renamed[key] == meant]
        if len(claims) > 1:
            what = f"{' and '.join(map(strict_json.show, claims))} may both be meant to be {meant}"
            raise InputError([Problem(name, what, hint="remove the wrong one")])
    items = [(renamed.get(key, key), value) for key, value in values.items()]
    values.clear()
    values.update(items)
    return renamed


def _values(document: dict[str, Any], name: str, missing: tuple[str, ...]) -> dict[str, Any]:
    """Values for missing keys: those beside the settings, what an older model reads absence as, or the published ones.

    Raises InputError for a required key of an older model, whose published value is not Kimi-K3's.
    """
    if rules.is_of_k25(document):
        if required := [key for key in missing if key in rules.REQUIRED and not rules.beside(document, key)]:
            what = f"a config of Kimi-K2.5 or K2.6 without {', '.join(required)}: the published values are Kimi-K3's"
            raise InputError([Problem(name, what, hint="take them from that model's own preprocessor_config.json")])
        defaults: Mapping[str, Any] = {**published_values(), **rules.READ_AS}
    else:
        defaults = published_values()
    elsewhere = {key: rules.beside(document, key) for key in missing}
    return {key: places[0] if (places := elsewhere[key]) else defaults[key] for key in missing}


def _write(target: Path, text: str) -> None:
    try:
        with open(target, "x", encoding="utf-8") as file:  # "x" refuses the input itself, and links to it
            try:
                file.write(text)
                file.flush()
            except OSError:
                target.unlink()  # a disk that is full: half a config is worse than none
                raise
    except FileExistsError:
        raise InputError([Problem(str(target), "exists already", "a new file", "choose another name")]) from None
    except FileNotFoundError:
        raise InputError([Problem(str(target), "its folder does not exist", hint="make the folder first")]) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError([Problem(str(target), f"cannot be written: {reason}")]) from error
