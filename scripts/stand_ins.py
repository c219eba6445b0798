"""What the engine checks need in place of a GPU and a checkpoint: empty modules, and a small tokenizer.

A stand-in module has whatever is asked of it, so an engine's files import on a machine without CUDA.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import subprocess
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

# --- wheels -------------------------------------------------------------------------------------------------------


def unpacked_wheel(name: str, version: str, folder: Path) -> Path:
    """The Python files of a released wheel, from the package registry; what is there already is not fetched again."""
    target = folder / f"{name}-{version}"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(folder), f"{name}=={version}"], check=True)
        wheel = next(folder.glob(f"{name}-{version}-*.whl"))
        part = target.with_suffix(".part")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part, [member for member in archive.namelist() if member.endswith(".py")])
        part.rename(target)
    return target


# --- modules ------------------------------------------------------------------------------------------------------


class StandIn(types.ModuleType):
    """A module whose names are mocks, made when they are asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "99.0"
        self.__file__ = "<stand-in>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins: for the modules in `names`, and for what files in `folder` import and nobody has installed."""

    def __init__(self, names: Sequence[str] = (), folder: Path | None = None) -> None:
        self._names = tuple(names)
        self._folder = None if folder is None else str(folder)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> Any:
        """A spec for a module that is to be stood in for, else None."""
        if any(f"{fullname}.".startswith(f"{name}.") for name in self._names) or self._is_missing(fullname):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def _is_missing(self, fullname: str) -> bool:
        top = fullname.partition(".")[0]
        if self._folder is None or (Path(self._folder) / top).is_dir():
            return False
        if fullname != top:
            return isinstance(sys.modules.get(top), StandIn)
        frame = sys._getframe(2)
        while frame.f_back and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame.f_code.co_filename.startswith(self._folder)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        """The empty module."""
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def stand_in(names: Sequence[str], folder: Path) -> None:
    """Import the engine in `folder`; `names` are stood in for even where they are installed, others if missing."""
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, StandIns(names))
    sys.meta_path.append(StandIns(folder=folder))


# --- tokenizer ----------------------------------------------------------------------------------------------------

#: A chat template that knows images, in the manner of Kimi's: one pad an image, in its place between the texts.
TEMPLATE = """
{%- for message in messages -%}
<|im_{{ message.role }}|>
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}<|media_pad|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>{%- endif -%}
"""


def tiny_tokenizer() -> Any:
    """A real tokenizer with Kimi's control tokens, a chat template, and a token for each byte of other text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    words = ["media_begin", "media_content", "media_pad", "media_end", "im_user", "im_assistant", "im_system", "im_end"]
    tokens = [f"<|{word}|>" for word in words]
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        additional_special_tokens=tokens,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
