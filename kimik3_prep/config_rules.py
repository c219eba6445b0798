"""The rules of `media_proc_cfg`, key by key. Used by `config.diagnose` only.

Which keys are required is SGLang's rule for deferred preprocessing; what an absent optional key reads as is the
checkpoint's own loader's.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from kimik3_prep import strict_json
from kimik3_prep.errors import Problem

REQUIRED = (
    "patch_size",
    "merge_kernel_size",
    "in_patch_limit",
    "patch_limit_on_one_side",
    "image_mean",
    "image_std",
)
_OPTIONAL = ("fixed_output_tokens", "transparent_bg_config", "transparent_bg_fill_stage")

#: Keys that a repaired copy gets when they are absent.
RESTORED = (*REQUIRED, *_OPTIONAL)

_STAGES = ("before_resize", "after_resize")
_PATTERNS = ("white", "black", "gray", "chessboard")
_BACKGROUND_DEFAULTS: dict[str, Any] = {
    "pattern": "black",
    "chessboard_square_size": 16,
    "chessboard_square_on_top_left": True,
    "chessboard_white_value": 255,
    "chessboard_gray_value": 200,
}
_LARGEST = 2**31 - 1
_LARGEST_SIDE = 4096  # of a patch in pixels, of a merge in patches: their squares are multiplied into sizes in bytes
_LARGEST_FLOAT32 = 3.4028234663852886e38
_READ_AS = {"fixed_output_tokens": None, "transparent_bg_config": None, "transparent_bg_fill_stage": "before_resize"}
_CHESSBOARD = "chessboard_"

#: Names other image processors use for what a Kimi-K3 key says.
_SYNONYMS = {
    "max_patches": "in_patch_limit",
    "max_num_patches": "in_patch_limit",
    "num_patches_limit": "in_patch_limit",
    "patch_limit": "in_patch_limit",
    "merge_size": "merge_kernel_size",
    "spatial_merge_size": "merge_kernel_size",
    "spatial_patch_size": "patch_size",
    "patch_limit_one_side": "patch_limit_on_one_side",
    "max_patches_per_side": "patch_limit_on_one_side",
    "mean": "image_mean",
    "pixel_mean": "image_mean",
    "std": "image_std",
    "pixel_std": "image_std",
    "fill_stage": "transparent_bg_fill_stage",
    "transparent_bg_stage": "transparent_bg_fill_stage",
    "background": "transparent_bg_config",
    "transparent_bg": "transparent_bg_config",
    "fixed_tokens": "fixed_output_tokens",
    "square_size": "chessboard_square_size",
    "square_on_top_left": "chessboard_square_on_top_left",
    "white_value": "chessboard_white_value",
    "gray_value": "chessboard_gray_value",
    "grey_value": "chessboard_gray_value",
    "chessboard_grey_value": "chessboard_gray_value",
}

Source = Literal["file", "default", "missing"]


def inner(document: Any) -> dict[str, Any] | None:
    """The object that holds the keys: `media_proc_cfg`, or the top level where they stand flat. None: not Kimi-K3's."""
    if not isinstance(document, dict):
        return None
    if "media_proc_cfg" in document:
        nested = document["media_proc_cfg"]
        return nested if isinstance(nested, dict) else None
    return document if any(key in document for key in _OWN_KEYS) else None


class Checker:
    """Collects the problems and the meaning of one config file."""

    def __init__(self, name: str, published: Mapping[str, Any]) -> None:
        self.problems: list[Problem] = []
        self.settings: list[tuple[str, Any, Any, Source]] = []
        self._name = name
        self._published = published
        self._prefix = ""

    def check(self, document: Any) -> dict[str, Any] | None:
        """The values in `PreprocessorConfig.to_dict` form; only to be used when no problem is an error."""
        cfg = self._locate(document)
        if cfg is None:
            return None
        unknown = [key for key in cfg if key not in self._published]
        self._check_missing(cfg, unknown)
        self._check_near_optional(cfg, unknown)
        values = {
            **self._integers(cfg),
            **self._mean_and_std(cfg),
            "fixed_output_tokens": self._fixed_tokens(cfg),
            "background": self._background(cfg),
            "fill_stage": self._fill_stage(cfg),
        }
        self._settings(cfg, values)
        return values

    def _add(self, key: str, what: str, expected: str = "", hint: str = "", warning: bool = False) -> None:
        where = f"{self._name}: {key}" if key else self._name
        self.problems.append(Problem(where, what, expected, hint, "warning" if warning else "error"))

    def _path(self, key: str) -> str:
        return f"{self._prefix}{key}"

    # --- where the keys are ---

    def _locate(self, document: Any) -> dict[str, Any] | None:
        if not isinstance(document, dict):
            self._add("", f"the top level is {show(document)}", "an object with media_proc_cfg")
            return None
        cfg = inner(document)
        if "media_proc_cfg" not in document:
            if cfg is None:
                self._refuse_other_model(document)
            return cfg
        self._prefix = "media_proc_cfg."
        if cfg is None:
            what = f"it is {show(document['media_proc_cfg'])}"
            self._add("media_proc_cfg", what, "an object", "copy the published one: kimi-k3")
            return None
        for key in (key for key in RESTORED if key in document):
            outer = document[key]
            if key in cfg and not same(outer, cfg[key]):
                what = f"media_proc_cfg says {show(cfg[key])}, the top level says {show(outer)}"
                self._add(key, what, "one value", "remove one of the two")
            elif key not in cfg and not (key in _READ_AS and same(outer, _READ_AS[key])):
                what = f"{show(outer)} stands at the top level, beside media_proc_cfg and not in it"
                self._add(key, what, "all keys in one place", "move it into media_proc_cfg")
        return cfg

    def _refuse_other_model(self, document: dict[str, Any]) -> None:
        keys = ("image_processor_type", "processor_class", "feature_extractor_type", "model_type")
        name = next((document[key] for key in keys if isinstance(document.get(key), str)), None)
        what, hint = "it has none of Kimi-K3's own keys", "--config kimi-k3 uses the published values"
        if name is not None and "kimi" not in name.lower():
            what = f"a config of {show(name)[1:-1]}, not of Kimi-K3: {what}"
        elif "architectures" in document or "model_type" in document:
            hint = "this looks like the model's config.json; preprocessor_config.json beside it is the one"
        elif near := difflib.get_close_matches("media_proc_cfg", document, 1, 0.7):
            hint = f"was media_proc_cfg meant by {show(near[0])}?"
        self._add("", what, "media_proc_cfg of a Kimi-K3 checkpoint", hint)

    def _check_missing(self, cfg: dict[str, Any], unknown: list[str]) -> None:
        missing = [key for key in REQUIRED if key not in cfg]
        if not missing:
            return
        what = f"Kimi-K3 image processor is missing deferred-preprocessing config: {', '.join(missing)}"
        meant = [f"was {key} meant by {show(near)}?" for key in missing for near in unknown if near_miss(near, (key,))]
        published = ", ".join(f'"{key}": {json.dumps(self._published[key])}' for key in missing)
        restore = f"published: {published}; `validate-config --write-fixed FILE` restores them"
        self._add(self._prefix.rstrip("."), what, "every required key", "; ".join([*meant, restore]))

    def _check_near_optional(self, cfg: dict[str, Any], unknown: list[str]) -> None:
        absent = tuple(key for key in _OPTIONAL if key not in cfg)
        for key in unknown:
            if near := near_miss(key, absent):
                what = f"{near} is absent and this key, which nothing reads, is here"
                self._add(self._path(key), what, near, f"was {near} meant?", warning=True)

    # --- values ---

    def _integers(self, cfg: dict[str, Any]) -> dict[str, int | None]:
        sizes = {key: self._integer(cfg, key) for key in ("patch_size", "in_patch_limit", "patch_limit_on_one_side")}
        merge = self._merge_size(cfg)
        side = sizes["patch_limit_on_one_side"]
        if side is not None and merge is not None and side % merge:
            fit = max(merge, side // merge * merge)
            expected = f"a multiple of merge_kernel_size ({merge})"
            self._add(self._path("patch_limit_on_one_side"), f"it is {side}", expected, f"write {fit}")
        patch = sizes["patch_size"]
        if side is not None and patch is not None and side * patch > _LARGEST:
            self._add(self._path("patch_limit_on_one_side"), f"{side} patches of {patch} pixels", "a sensible size")
        return {**sizes, "merge_size": merge}

    def _merge_size(self, cfg: dict[str, Any]) -> int | None:
        value = cfg.get("merge_kernel_size")
        if not isinstance(value, list):
            return self._integer(cfg, "merge_kernel_size")
        key = self._path("merge_kernel_size")
        if len(value) != 2 or not same(value[0], value[1]):
            self._add(key, f"it is {show(value)}", "one integer, the same for both sides", "write 2")
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
        hint = f"write {fixed}" if fits else f"the published value is {json.dumps(self._published.get(key))}"
        self._add(self._path(key), f"it is {show(value)}", expected, hint)
        return None

    def _mean_and_std(self, cfg: dict[str, Any]) -> dict[str, list[float] | None]:
        mean, std = self._channel_values(cfg, "image_mean"), self._channel_values(cfg, "image_std")
        if mean and std:
            for m, s in zip(mean, std, strict=True):
                if max(abs(m), abs(1.0 - m)) * (1.0 / s) > _LARGEST_FLOAT32:
                    what = f"it is {show(std)}: with image_mean {show(mean)} features leave float32"
                    self._add(self._path("image_std"), what, "finite features", self._as_published("image_std"))
                    break
        return {"image_mean": mean, "image_std": std}

    def _as_published(self, key: str) -> str:
        return f"the published value is {json.dumps(self._published[key])}"

    def _channel_values(self, cfg: dict[str, Any], key: str) -> list[float] | None:
        if key not in cfg:
            return None
        value, path = cfg[key], self._path(key)
        if is_number(value):
            hint = f"write {json.dumps([value] * 3)}"
            self._add(path, f"it is the single number {show(value)}", "three numbers, one a channel", hint)
            return None
        if not isinstance(value, list) or len(value) != 3 or not all(is_number(v) for v in value):
            self._add(path, f"it is {show(value)}", "exactly three finite numbers", self._as_published(key))
            return None
        for wrong, expected in (
            (key == "image_std" and min(value) <= 0, "numbers above zero"),
            (key == "image_std" and min(value) < 1e-30, "numbers whose inverse is finite"),
            (max(abs(v) for v in value) > 1e30, "numbers of a sensible size"),
        ):
            if wrong:
                self._add(path, f"it is {show(value)}", expected, self._as_published(key))
                return None
        if max(value) > 1:
            what = f"it is {show(value)}: on the scale of 0 to 255?"
            self._add(path, what, "values on the scale of 0 to 1", "divide by 255", warning=True)
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
            what = f"it is {value}: it fixes num_tokens and changes neither grid nor pixels"
            self._add(self._path(key), what, "null, as published", warning=True)
        return value

    def _fill_stage(self, cfg: dict[str, Any]) -> str:
        key = "transparent_bg_fill_stage"
        if key not in cfg:
            what = "absent, read as before_resize; the published config says after_resize, which gives other pixels"
            self._add(self._path(key), what, '"after_resize"', warning=True)
            return "before_resize"
        return self._word(key, cfg[key], _STAGES, "before_resize")

    def _word(self, key: str, value: Any, words: tuple[str, ...], fallback: str) -> str:
        if isinstance(value, str) and value in words:
            return value
        near = difflib.get_close_matches(value[:100].lower(), words, 1, 0.4) if isinstance(value, str) else []
        published = self._published["transparent_bg_config"] | self._published
        hint = f'was "{near[0]}" meant?' if near else f"the published value is {show(published[key.split('.')[-1]])}"
        self._add(self._path(key), f"it is {show(value)}", " or ".join(f'"{word}"' for word in words), hint)
        return fallback

    def _background(self, cfg: dict[str, Any]) -> dict[str, Any] | None:
        key = "transparent_bg_config"
        if key not in cfg:
            what = "absent: alpha is dropped; the published config draws a chessboard behind transparent pixels"
            self._add(self._path(key), what, "the published object, or null", warning=True)
            return None
        value = cfg[key]
        if value is None:
            return None
        if not isinstance(value, dict):
            self._add(self._path(key), f"it is {show(value)}", "an object or null")
            return None
        for name in value:
            if name not in _BACKGROUND_DEFAULTS:
                near = near_miss(name, tuple(_BACKGROUND_DEFAULTS))
                hint = f"was {near} meant?" if near else f"known keys are {', '.join(_BACKGROUND_DEFAULTS)}"
                self._add(self._path(f"{key}.{name}"), "the checkpoint's loader knows no such key", "", hint)
        full = {**_BACKGROUND_DEFAULTS, **value}
        used = _BACKGROUND_DEFAULTS if full["pattern"] == "chessboard" else ("pattern",)
        if absent := [name for name in used if name not in value]:
            what = "absent keys are read as " + ", ".join(f'"{name}": {show(full[name])}' for name in absent)
            self._add(self._path(key), what, "every key that is used", "write them down", warning=True)
        top_left = full["chessboard_square_on_top_left"]
        if type(top_left) is not bool:
            path = self._path(f"{key}.chessboard_square_on_top_left")
            self._add(path, f"it is {show(top_left)}", "true or false")
        return {
            "pattern": self._word(f"{key}.pattern", full["pattern"], _PATTERNS, "black"),
            "square_size": self._level(key, full, "square_size", 1, _LARGEST),
            "square_on_top_left": top_left is True,
            "white_value": self._level(key, full, "white_value", 0, 255),
            "gray_value": self._level(key, full, "gray_value", 0, 255),
        }

    def _level(self, key: str, full: dict[str, Any], name: str, low: int, high: int) -> int:
        value = full[_CHESSBOARD + name]
        if type(value) is int and low <= value <= high:
            return value
        expected = f"an integer from {low} to {high}" if high == 255 else f"an integer of at least {low}"
        fixed = as_integer(value)
        hint = f"write {fixed}" if fixed is not None and low <= fixed <= high else ""
        self._add(self._path(f"{key}.{_CHESSBOARD}{name}"), f"it is {show(value)}", expected, hint)
        return low

    # --- the table ---

    def _settings(self, cfg: dict[str, Any], values: dict[str, Any]) -> None:
        read = {
            "merge_kernel_size": values["merge_size"],
            "transparent_bg_fill_stage": values["fill_stage"],
            "transparent_bg_config": None,
            "fixed_output_tokens": values["fixed_output_tokens"],
        }
        for key in (*REQUIRED, *_OPTIONAL):
            source: Source = "file" if key in cfg else "missing" if key in REQUIRED else "default"
            value = cfg[key] if key in cfg else read.get(key)
            if key == "merge_kernel_size" and values["merge_size"] is not None:
                value = values["merge_size"]
            if key != "transparent_bg_config" or not isinstance(value, dict):
                self.settings.append((key, value, self._published[key], source))
                continue
            for name, default in _BACKGROUND_DEFAULTS.items():
                published = self._published[key].get(name)
                inner_source: Source = "file" if name in value else "default"
                self.settings.append((f"{key}.{name}", value.get(name, default), published, inner_source))


#: Keys that make a flat config Kimi-K3's; patch_size, image_mean and image_std other model families have too.
_OWN_KEYS = ("in_patch_limit", "merge_kernel_size", "patch_limit_on_one_side", *_OPTIONAL)


def near_miss(key: str, wanted: tuple[str, ...]) -> str | None:
    """The wanted key that `key` was probably meant to be."""
    folded = key[:100].lower().replace("-", "_")
    if _SYNONYMS.get(folded) in wanted:
        return _SYNONYMS[folded]
    near = difflib.get_close_matches(folded, wanted, 1, 0.8)
    return near[0] if near else None


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values; true is not 1 and 14.0 is not 14."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def is_number(value: Any) -> bool:
    """A finite JSON number; true is none."""
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def as_integer(value: Any) -> int | None:
    """The integer that a string or a float was meant to be."""
    if isinstance(value, str):
        digits = value.strip()
        return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST else None


def show(value: Any) -> str:
    """A JSON value, cut to a line."""
    return strict_json.show(value, 100)
