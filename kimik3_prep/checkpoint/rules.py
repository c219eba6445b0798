"""The rules of `media_proc_cfg`, key by key. Used by `config.diagnose` only.

SGLang's deferred path says which keys are required, the checkpoint's loader what an absent optional key reads as.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kimik3_prep.errors import Problem
from kimik3_prep.strict_json import as_integer, is_number, same, show

REQUIRED = (
    "patch_size",
    "merge_kernel_size",
    "in_patch_limit",
    "patch_limit_on_one_side",
    "image_mean",
    "image_std",
)
OPTIONAL = ("fixed_output_tokens", "transparent_bg_config", "transparent_bg_fill_stage")
RESTORED = (*REQUIRED, *OPTIONAL)  # what a repaired copy has

_STAGES = ("before_resize", "after_resize")
_PATTERNS = ("white", "black", "gray", "chessboard")
#: What an absent key of `transparent_bg_config` reads as.
BACKGROUND_DEFAULTS: dict[str, Any] = {
    "pattern": "black",
    "chessboard_square_size": 16,
    "chessboard_square_on_top_left": True,
    "chessboard_white_value": 255,
    "chessboard_gray_value": 200,
}
_LARGEST = 2**31 - 1
_LARGEST_SIDE = 4096  # of a patch in pixels, of a merge in patches: their squares are multiplied into sizes in bytes
_LARGEST_FLOAT32 = 3.4028234663852886e38
READ_AS = {"fixed_output_tokens": None, "transparent_bg_config": None, "transparent_bg_fill_stage": "before_resize"}
_CHESSBOARD = "chessboard_"
_PUBLISHED_HINT = "--config kimi-k3 uses the published values"
_EXPECTED = "the preprocessor_config.json of a Kimi-K3 checkpoint"
MOST_GUESSES = 500  # keys compared with the ones wanted: a hostile file could hold a hundred thousand

#: Names other image processors use for what a Kimi-K3 key says.
_SYNONYMS = {
    "patch_size": ("spatial_patch_size",),
    "merge_kernel_size": ("merge_size", "spatial_merge_size"),
    "in_patch_limit": ("max_patches", "max_num_patches", "num_patches_limit", "patch_limit"),
    "patch_limit_on_one_side": ("patch_limit_one_side", "max_patches_per_side"),
    "image_mean": ("mean", "pixel_mean"),
    "image_std": ("std", "pixel_std"),
    "fixed_output_tokens": ("fixed_tokens",),
    "transparent_bg_config": ("background", "transparent_bg"),
    "transparent_bg_fill_stage": ("fill_stage", "transparent_bg_stage"),
    "chessboard_square_size": ("square_size",),
    "chessboard_square_on_top_left": ("square_on_top_left",),
    "chessboard_white_value": ("white_value",),
    "chessboard_gray_value": ("gray_value", "grey_value", "chessboard_grey_value"),
}
_MEANT_BY = {name: key for key, names in _SYNONYMS.items() for name in names}


#: Relatives of Kimi-K3 whose images are prepared otherwise, and the older models whose images are prepared alike.
_RELATIVE = re.compile(r"kimi[-_ .]?(?:vl|audio|dev|linear|k1|k2(?![-_.]?[56]))", re.IGNORECASE)
_K25 = re.compile(r"kimi[-_ .]?k2[-_.]?[56]", re.IGNORECASE)
_NAMES = ("image_processor_type", "processor_class", "feature_extractor_type", "model_type")

#: Keys that stand beside the settings in any image processor's file.
_USUAL = frozenset(
    {*_NAMES, "auto_map", "media_proc_cfg", "image_processor", "transformers_version", "_name_or_path", "architectures"}
)
_MOST_UNKNOWN = 20  # keys that are named one by one


def _holders(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Path and value of the objects that may hold the settings: the top level, and what transformers 5 puts below."""
    below = document.get("image_processor")
    return [("", document), *([("image_processor", below)] if isinstance(below, dict) else [])]


def _places(document: dict[str, Any]) -> list[tuple[str, Any]]:
    """Path and value of all that may be the settings; the first one is."""
    holders = _holders(document)
    nested = [
        (f"{path}.media_proc_cfg".lstrip("."), holder["media_proc_cfg"])
        for path, holder in holders
        if "media_proc_cfg" in holder
    ]
    return nested + [(path, holder) for path, holder in holders if any(key in holder for key in _OWN_KEYS)]


def inner(document: Any) -> dict[str, Any] | None:
    """The object that holds the keys: `media_proc_cfg`, or where they stand flat. None: the file is not Kimi-K3's."""
    places = _places(document) if isinstance(document, dict) else []
    return places[0][1] if places and isinstance(places[0][1], dict) else None


def beside(document: dict[str, Any], key: str) -> list[Any]:
    """The values of a key that stands beside the settings and not in them."""
    cfg = inner(document)
    objects = [value for _, value in [*_places(document), *_holders(document)] if isinstance(value, dict)]
    return [values[key] for values in objects if values is not cfg and key in values]


def _names(document: dict[str, Any]) -> Iterator[str]:
    """What a config says it belongs to."""
    for _, holder in _holders(document):
        for key in _NAMES:
            if isinstance(holder.get(key), str):
                yield holder[key]
        classes = holder.get("auto_map")
        for value in classes.values() if isinstance(classes, dict) else ():
            if isinstance(value, str):
                yield value.rpartition(".")[2]


def relative_of(document: dict[str, Any]) -> str | None:
    """The relative of Kimi-K3 that a config names itself after."""
    return next((name for name in _names(document) if _RELATIVE.match(name)), None)


def is_of_k25(document: dict[str, Any]) -> bool:
    """Whether a config names itself after Kimi-K2.5 or K2.6."""
    return any(_K25.match(name) for name in _names(document))


class Checker:
    """Collects the problems and the meaning of one config file."""

    def __init__(self, name: str, published: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self._name = name
        self._published = published
        self._prefix = ""

    def check(self, document: Any) -> dict[str, Any] | None:
        """The values in `PreprocessorConfig.to_dict` form; only to be used when no problem is an error."""
        cfg = self._locate(document)
        if cfg is None:
            return None
        unknown = [key for key in cfg if key not in self._published and key not in _USUAL]
        self._check_missing(cfg, unknown[:MOST_GUESSES])
        self._check_unknown(cfg, unknown)
        return {
            **self._integers(cfg),
            **self._mean_and_std(cfg),
            "fixed_output_tokens": self._fixed_tokens(cfg),
            "background": self._background(cfg),
            "fill_stage": self._fill_stage(cfg),
        }

    def _add(self, key: str, what: str, expected: str = "", hint: str = "", warning: bool = False) -> None:
        where = f"{self._name}: {key}" if key else self._name
        self.problems.append(Problem(where, what, expected, hint, "warning" if warning else "error"))

    def _path(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def _as_published(self, key: str) -> str:
        value: Any = self._published
        for name in key.split("."):
            value = value[name]
        return f"the published value is {json.dumps(value)}"

    # --- where the keys are ---

    def _locate(self, document: Any) -> dict[str, Any] | None:
        if not isinstance(document, dict):
            self._add("", f"the top level is {show(document)}", "an object with media_proc_cfg")
            return None
        if (relative := relative_of(document)) is not None:
            what = f"this is a config of {_plain(relative)}, a relative of Kimi-K3 that prepares images in another way"
            self._add("", what, _EXPECTED, _PUBLISHED_HINT)
            return None
        places = _places(document)
        if not places:
            self._refuse_other_model(document)
            return None
        path, cfg = places[0]
        self._prefix = f"{path}." if path else ""
        if not isinstance(cfg, dict):
            self._add(path, f"it is {show(cfg)}", "an object", _PUBLISHED_HINT)
            return None
        name = next(_names(document), None)
        if path in ("", "image_processor") and name and "kimi" not in name.lower() and not cfg.keys() >= {*REQUIRED}:
            self._refuse_other_model(document)
            return None
        for other, values in [*places[1:], *_holders(document)]:
            if isinstance(values, dict) and values is not cfg:
                self._compare(path, cfg, other, values)
        return cfg

    def _compare(self, path: str, cfg: dict[str, Any], other: str, values: dict[str, Any]) -> None:
        """Settings that stand in another place as well, or only there."""
        there = other or "the top level"
        for key in (key for key in RESTORED if key in values):
            where = f"{other}.{key}".lstrip(".")
            if any(problem.where == f"{self._name}: {where}" for problem in self.problems):
                continue
            value = values[key]
            if key in cfg and not same(value, cfg[key]):
                what = f"{path or 'the top level'} says {show(cfg[key])}, {there} says {show(value)}"
                self._add(where, what, "one value", "remove one of the two")
            elif key not in cfg and not (key in READ_AS and same(value, READ_AS[key])):
                what = f"{show(value)} stands at {there}, beside {path} and not in it"
                self._add(where, what, "all keys in one place", f"move it into {path}")

    def _refuse_other_model(self, document: dict[str, Any]) -> None:
        name = next(_names(document), None)
        what, hint = "it has none of Kimi-K3's own keys", _PUBLISHED_HINT
        if any(key in document for key in _OWN_KEYS):
            what = "keys of Kimi-K3 are missing"
        if name is not None:
            other = "" if "kimi" in name.lower() else ", not of Kimi-K3"
            what = f"this is a config of {_plain(name)}{other}: {what}"
        if "architectures" in document:
            hint = "this looks like the model's config.json; preprocessor_config.json beside it is the one"
        elif near := difflib.get_close_matches("media_proc_cfg", document, 1, 0.7):
            hint = f"was {show(near[0])} meant to be media_proc_cfg?"
        self._add("", what, _EXPECTED, hint)

    def _check_missing(self, cfg: dict[str, Any], unknown: list[str]) -> None:
        missing = [key for key in REQUIRED if key not in cfg]
        if not missing:
            return
        what = f"Kimi-K3 image processor is missing deferred-preprocessing config: {', '.join(missing)}"
        published = ", ".join(f'"{key}": {json.dumps(self._published[key])}' for key in missing)
        guesses = {key: near_miss(key, tuple(missing)) for key in unknown}
        meant = [f"was {show(key)} meant to be {guess}?" for key, guess in guesses.items() if guess][:5]
        restore = "`kimik3-prep validate-config --write-fixed FILE` writes a copy that has the published values"
        self._add(self._prefix.rstrip("."), what, f"{published}, as published", " ".join([*meant, restore]))

    def _check_unknown(self, cfg: dict[str, Any], unknown: list[str]) -> None:
        absent = tuple(key for key in OPTIONAL if key not in cfg)
        missing = tuple(key for key in REQUIRED if key not in cfg)
        for number, key in enumerate(unknown):
            if number == _MOST_UNKNOWN:
                what = f"nothing reads {len(unknown) - number:,} more keys"
                self._add(self._prefix.rstrip("."), what, warning=True)
                break
            path = f"{self._prefix.rstrip('.')}{step(key)}".lstrip(".")
            if near_miss(key, missing):
                continue  # it stands in the sentence about what is missing
            if near := near_miss(key, absent):
                what = f"nothing reads this key, and {near} is absent"
                self._add(path, what, hint=f"was {near} meant?", warning=True)
            else:
                self._add(path, "nothing reads this key", warning=True)

    # --- values ---

    def _integers(self, cfg: dict[str, Any]) -> dict[str, int | None]:
        sizes = {key: self._integer(cfg, key) for key in ("patch_size", "in_patch_limit", "patch_limit_on_one_side")}
        merge = self._merge_size(cfg)
        side = sizes["patch_limit_on_one_side"]
        if side is not None and merge is not None and side % merge:
            below = side - side % merge
            hint = f"write {below} or {below + merge}" if below else f"write {merge}"
            expected = f"a multiple of merge_kernel_size ({merge})"
            self._add(self._path("patch_limit_on_one_side"), f"it is {side}", expected, hint)
        patch = sizes["patch_size"]
        if side is not None and patch is not None and side * patch > _LARGEST:
            what, hint = f"it is {side}, with a patch_size of {patch}", self._as_published("patch_limit_on_one_side")
            self._add(self._path("patch_limit_on_one_side"), what, f"a side of at most {_LARGEST} pixels", hint)
        return {**sizes, "merge_size": merge}

    def _merge_size(self, cfg: dict[str, Any]) -> int | None:
        value = cfg.get("merge_kernel_size")
        if not isinstance(value, list):
            return self._integer(cfg, "merge_kernel_size")
        key = self._path("merge_kernel_size")
        if len(value) != 2 or not same(value[0], value[1]):
            hint = self._as_published("merge_kernel_size")
            self._add(key, f"it is {show(value)}", "one integer, the same for both sides", hint)
            return None
        size = self._integer({"merge_kernel_size": value[0]}, "merge_kernel_size")
        if size is not None:
            self._add(key, f"it is {show(value)}, read as {size}", "one integer", f"write {size}", warning=True)
        return size

    def _integer(self, cfg: Mapping[str, Any], key: str) -> int | None:
        if key not in cfg:
            return None
        value = cfg[key]
        most = _LARGEST_SIDE if key in ("patch_size", "merge_kernel_size") else _LARGEST
        if type(value) is int and 0 < value <= most:
            return value
        expected = "an integer above zero" if type(value) is not int or value < 1 else f"at most {most}"
        fixed = as_integer(value)
        fits = fixed is not None and 0 < fixed <= most
        hint = f"write {fixed}" if fits else self._as_published(key)
        self._add(self._path(key), f"it is {show(value)}", expected, hint)
        return None

    def _mean_and_std(self, cfg: dict[str, Any]) -> dict[str, list[float] | None]:
        mean, std = self._channel_values(cfg, "image_mean"), self._channel_values(cfg, "image_std")
        if mean and std:
            for m, s in zip(mean, std, strict=True):
                if max(abs(m), abs(1.0 - m)) * (1.0 / s) > _LARGEST_FLOAT32:
                    what = f"it is {show(std)}: with image_mean {show(mean)} the features do not fit into float32"
                    self._add(self._path("image_std"), what, "a larger image_std", self._as_published("image_std"))
                    break
        return {"image_mean": mean, "image_std": std}

    def _channel_values(self, cfg: dict[str, Any], key: str) -> list[float] | None:
        if key not in cfg:
            return None
        value, path = cfg[key], self._path(key)
        if is_number(value):
            self._add(path, f"it is {show(value)}", "three numbers, one a channel", f"write {show([value] * 3)}")
            return None
        if not isinstance(value, list) or len(value) != 3 or not all(is_number(v) for v in value):
            self._add(path, f"it is {show(value)}", "exactly three finite numbers", self._as_published(key))
            return None
        for wrong, expected in (
            (key == "image_std" and min(value) <= 0, "numbers above zero"),
            (key == "image_std" and min(value) < 1e-30, "numbers that one can divide by in float32"),
            (max(abs(v) for v in value) > 1e30, "numbers for pixels from 0 to 1"),
        ):
            if wrong:
                self._add(path, f"it is {show(value)}", expected, self._as_published(key))
                return None
        if max(value) > 1:
            what, hint = f"it is {show(value)}", f"divided by 255: {json.dumps([round(v / 255, 6) for v in value])}"
            self._add(path, what, "numbers for pixels from 0 to 1, not from 0 to 255", hint, warning=True)
        return [float(v) for v in value]

    def _fixed_tokens(self, cfg: dict[str, Any]) -> int | None:
        key = "fixed_output_tokens"
        if key not in cfg:
            what = "absent, read as null; the checkpoint's own processor needs the key"
            self._add(self._path(key), what, "null", 'write "fixed_output_tokens": null', warning=True)
            return None
        if cfg[key] is None:
            return None
        value = self._integer(cfg, key)
        if value is not None:
            what = f"it is {value}: num_tokens is {value} for every image, grids and pixels stay as they are"
            self._add(self._path(key), what, "null, as published", warning=True)
        return value

    def _fill_stage(self, cfg: dict[str, Any]) -> str:
        key = "transparent_bg_fill_stage"
        if key not in cfg:
            what = "absent, read as before_resize; the published config says after_resize, which gives other pixels"
            hint = f'right for Kimi-K2.5 and K2.6; for Kimi-K3 write "{key}": "after_resize"'
            self._add(self._path(key), what, '"after_resize"', hint, warning=True)
            return "before_resize"
        return self._word(key, cfg[key], _STAGES, "before_resize")

    def _word(self, key: str, value: Any, words: tuple[str, ...], fallback: str) -> str:
        if isinstance(value, str) and value in words:
            return value
        near = difflib.get_close_matches(value[:100].lower(), words, 1, 0.4) if isinstance(value, str) else []
        hint = f'was "{near[0]}" meant?' if near else self._as_published(key)
        self._add(self._path(key), f"it is {show(value)}", " or ".join(f'"{word}"' for word in words), hint)
        return fallback

    def _background(self, cfg: dict[str, Any]) -> dict[str, Any] | None:
        key = "transparent_bg_config"
        if key not in cfg:
            what = "absent: alpha is dropped; the published config draws a chessboard behind transparent pixels"
            hint = f'right for Kimi-K2.5 and K2.6, which may write "{key}": null'
            self._add(self._path(key), what, "the published object, or null", hint, warning=True)
            return None
        value = cfg[key]
        if value is None:
            return None
        if not isinstance(value, dict):
            self._add(self._path(key), f"it is {show(value)}", "an object or null", self._as_published(key))
            return None
        self._check_background_keys(key, value)
        full = {**BACKGROUND_DEFAULTS, **value}
        top_left = full["chessboard_square_on_top_left"]
        if type(top_left) is not bool:
            path = f"{key}.chessboard_square_on_top_left"
            meant = {"true": "write true", "1": "write true", "false": "write false", "0": "write false"}
            hint = meant.get(show(top_left).strip('"').lower(), self._as_published(path))
            self._add(self._path(path), f"it is {show(top_left)}", "true or false", hint)
        return {
            "pattern": self._word(f"{key}.pattern", full["pattern"], _PATTERNS, "black"),
            "square_size": self._level(key, full, "square_size", 1, _LARGEST),
            "square_on_top_left": top_left is True,
            "white_value": self._level(key, full, "white_value", 0, 255),
            "gray_value": self._level(key, full, "gray_value", 0, 255),
        }

    def _check_background_keys(self, key: str, value: dict[str, Any]) -> None:
        known, what = tuple(BACKGROUND_DEFAULTS), "the checkpoint's loader refuses keys that it does not know"
        for name in (name for name in value if name not in known):
            near = near_miss(name, known)
            hint = f"was {near} meant?" if near else f"it knows {', '.join(known)}"
            self._add(self._path(key) + step(name), what, hint=hint)
        used = BACKGROUND_DEFAULTS if value.get("pattern") == "chessboard" else ("pattern",)
        if absent := [name for name in used if name not in value]:
            read = ", ".join(f'"{name}": {json.dumps(BACKGROUND_DEFAULTS[name])}' for name in absent)
            what = f"not everything is written out; the checkpoint's loader reads what is absent as {read}"
            published = ", ".join(f'"{name}": {json.dumps(self._published[key][name])}' for name in absent)
            self._add(self._path(key), what, f"{published}, as published", warning=True)

    def _level(self, key: str, full: dict[str, Any], name: str, low: int, high: int) -> int:
        value = full[_CHESSBOARD + name]
        if type(value) is int and low <= value <= high:
            return value
        expected = f"an integer from {low} to {high}" if high == 255 else f"an integer of at least {low}"
        fixed = as_integer(value)
        path = f"{key}.{_CHESSBOARD}{name}"
        hint = f"write {fixed}" if fixed is not None and low <= fixed <= high else self._as_published(path)
        self._add(self._path(path), f"it is {show(value)}", expected, hint)
        return low


#: Keys that make a flat config Kimi-K3's. Other families have patch_size, merge_kernel_size, image_mean and image_std.
_OWN_KEYS = ("in_patch_limit", "patch_limit_on_one_side", *OPTIONAL)


def step(name: str) -> str:
    """A key as a step of a JSON path; one that is no plain word is quoted, and cut where it is long."""
    return f".{name}" if len(name) <= 60 and name.isidentifier() and name.isascii() else f"[{show(name)}]"


def _plain(name: str) -> str:
    return show(name)[1:-1]


def near_miss(key: str, wanted: tuple[str, ...]) -> str | None:
    """The wanted key that `key` was probably meant to be."""
    folded = key[:100].lower().replace("-", "_")
    if _MEANT_BY.get(folded) in wanted:
        return _MEANT_BY[folded]
    near = difflib.get_close_matches(folded, wanted, 1, 0.8)
    return near[0] if near else None
