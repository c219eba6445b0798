"""engines.py: prompts become ids with room for their images, and requests hold what the engines' code takes."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import Silent, local_row, picture, write_manifest
from stand_ins import tiny_tokenizer

from kimik3_prep.errors import FailedItem, InputError
from kimik3_prep.reading.features import FeatureStore
from kimik3_prep.run.prepare import Settings, prepare

DTYPES = ["float32", "bfloat16", "float16", "uint8"]
HEADS = {"one": "<|media_begin|>image 60x40<|media_content|>", "two": "<|media_begin|>image 90x50<|media_content|>"}
TOKENS = {"one": 6, "two": 8}


def frame(name: str, pads: int | None = None) -> str:
    return HEADS[name] + "<|media_pad|>" * (TOKENS[name] if pads is None else pads) + "<|media_end|>"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run in every dtype: two pictures, one that is missing, and features of unknown size."""
    folder = tmp_path_factory.mktemp("engines")
    picture(60, 40, seed=1).save(folder / "one.png")
    picture(90, 50, seed=2).save(folder / "two.png")
    rows = [{"id": name, "image": f"{name}.png"} for name in ("one", "two", "gone")]
    rows.append(local_row(folder, "unsized.npy", picture(30, 30, seed=3)))
    manifest = write_manifest(folder / "m.jsonl", rows)
    for dtype in DTYPES:
        prepare(Settings(str(manifest), folder / dtype, "kimi-k3", "cpu", dtype), Silent())
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


# --- prompts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        "<|media_pad|>Compare é with <|media_pad|>.",
        f"{frame('one')}Compare é with {frame('two')}.",
        f"{frame('one', 1)}Compare é with <|media_pad|>.",
    ],
)
def test_each_place_in_a_text_becomes_its_image(made: Path, tokenizer: Any, prompt: str) -> None:
    store = FeatureStore(made / "uint8")
    full = f"{frame('one')}Compare é with {frame('two')}."
    ids = store.prompt_ids(["one", "two"], prompt, tokenizer)
    assert decoded(tokenizer, ids) == full
    assert store.prompt_ids(["one", "two"], tokenizer.encode(prompt), tokenizer) == ids
    assert full == f"{store.prompt('one')}Compare é with {store.prompt('two')}."


def test_several_turns_of_a_chat_are_framed_by_the_tokenizers_template(made: Path, tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A sign."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image_url"}]},
    ]
    ids = FeatureStore(made / "uint8").prompt_ids(["two", "one"], messages, tokenizer)
    assert decoded(tokenizer, ids) == (
        f"<|im_system|>Be brief.<|im_end|><|im_user|>{frame('two')}What is this?<|im_end|>"
        f"<|im_assistant|>A sign.<|im_end|><|im_user|>And {frame('one')}<|im_end|><|im_assistant|>"
    )
    last = FeatureStore(made / "uint8").prompt_ids(["two", "one"], messages, tokenizer, add_generation_prompt=False)
    assert ids[: len(last)] == last
    assert decoded(tokenizer, ids[len(last) :]) == "<|im_assistant|>"


def test_a_renderer_that_asks_for_the_text_of_the_images_gets_one_pad_each(made: Path, tokenizer: Any) -> None:
    """The checkpoint's tokenizer has no template; its renderer takes `image_prompts`."""

    class Renders(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, *, image_prompts: list[str], **options: Any) -> list[int]:
            assert options == {"tokenize": True, "return_dict": False, "add_generation_prompt": True, "thinking": False}
            return list(self.encode("".join(image_prompts) + messages[0]["content"]))

    own = Renders(tokenizer_object=tokenizer.backend_tokenizer)
    messages = [{"role": "user", "content": "?"}]
    ids = FeatureStore(made / "uint8").prompt_ids(["one", "two"], messages, own, thinking=False)
    assert decoded(tokenizer, ids) == f"{frame('one')}{frame('two')}?"


def test_a_tokenizer_that_begins_every_text_begins_the_prompt_once(made: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    begins = tiny_tokenizer()
    begins.add_special_tokens({"bos_token": "<s>"})
    begin = begins.convert_tokens_to_ids("<s>")
    begins.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    ids = FeatureStore(made / "uint8").prompt_ids(["one"], "<|media_pad|>?", begins)
    assert ids[0] == begin
    assert ids.count(begin) == 1
    assert decoded(begins, ids[1:]) == f"{frame('one')}?"


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ("What?", "it has places for 0 images, and 2 ids are given"),
        ("<|media_pad|>" * 3, "it has places for 3 images, and 2 ids are given"),
        (f"{frame('two')}{frame('one')}", "image 1 stands there as .*image 90x50.* with 8 pads"),
        (f"{frame('one', 5)}{frame('two')}", "with 5 pads; expected .*60x40.* with 6 pads for line 1, one"),
        (f"{HEADS['one']}<|media_pad|>{frame('two')}", "it has places for 1 images"),
        ([{"role": "user", "content": "?"}, "?"], "it holds neither messages nor ids alone"),
    ],
)
def test_a_prompt_that_does_not_fit_its_images_is_refused(made: Path, tokenizer: Any, prompt: Any, what: str) -> None:
    store = FeatureStore(made / "uint8")
    for call in (store.prompt_ids, store.sglang_request):
        with pytest.raises(InputError, match=what):
            call(["one", "two"], prompt, tokenizer)


def test_a_tokenizer_of_another_model_is_refused(made: Path) -> None:
    other = tiny_tokenizer()
    other = type(other)(tokenizer_object=type(other.backend_tokenizer)(other.backend_tokenizer.model))
    with pytest.raises(InputError, match=r"it has no token <\|media_begin\|>, <\|media_content\|>, <\|media_pad\|>"):
        FeatureStore(made / "uint8").prompt_ids(["one"], "<|media_pad|>", other)


# --- SGLang -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_sglang_request_has_one_pad_and_the_place_of_every_image(made: Path, tokenizer: Any, dtype: str) -> None:
    store = FeatureStore(made / dtype)
    prompt = "<|media_pad|>and <|media_pad|>?"
    request = store.sglang_request(["two", "one"], prompt, tokenizer)
    full = store.prompt_ids(["two", "one"], prompt, tokenizer)
    pad, filler = (tokenizer.convert_tokens_to_ids(f"<|media_{word}|>") for word in ("pad", "content"))
    (images,) = request.image_data
    assert list(images) == ["format", "modality", "pixel_values", "image_grid_thw", "offsets"]
    assert (images["format"], images["modality"]) == ("processor_output", "IMAGE")
    assert images["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 6]]
    assert images["image_grid_thw"].dtype == torch.int64
    expected = store.batch(["two", "one"]).pixel_values.to(torch.bfloat16)
    assert images["pixel_values"].dtype == torch.bfloat16
    assert torch.equal(images["pixel_values"], expected)
    assert [full[first : last + 1] for first, last in images["offsets"]] == [[pad] * 8, [pad] * 6]
    assert full[images["offsets"][0][0] - 1] != pad
    assert request.input_ids.count(pad) == 1
    assert request.input_ids[images["offsets"][0][0]] == pad
    assert [now for now, before in zip(request.input_ids, full, strict=True) if now != before] == [filler] * 13
    wide = store.sglang_request(["two"], "<|media_pad|>", tokenizer, dtype="float32").image_data[0]["pixel_values"]
    assert wide.dtype == torch.float32


def test_a_request_without_images_is_its_text(made: Path, tokenizer: Any) -> None:
    request = FeatureStore(made / "uint8").sglang_request([], "Hello", tokenizer)
    assert request._asdict() == {"input_ids": tokenizer.encode("Hello"), "image_data": []}


def test_what_sglang_would_misread_is_refused(made: Path, tokenizer: Any) -> None:
    raw = FeatureStore(made / "uint8", raw=True)
    with pytest.raises(InputError, match="SGLang takes normalised values"):
        raw.sglang_request(["one"], "<|media_pad|>", tokenizer)
    store = FeatureStore(made / "uint8")
    with pytest.raises(InputError, match="does not hold normalised values"):
        store.sglang_request(["one"], "<|media_pad|>", tokenizer, dtype="uint8")
    with pytest.raises(InputError, match=r"unsized.npy: its original size is unknown"):
        store.sglang_request(["unsized.npy"], "<|media_pad|>", tokenizer)
    with pytest.raises(FailedItem, match="gone has no features"):
        store.sglang_request(["gone"], "<|media_pad|>", tokenizer)
    with pytest.raises(KeyError, match="no item 'three'"):
        store.sglang_request(["three"], "<|media_pad|>", tokenizer)
    with pytest.raises(TypeError, match="the one string 'one'"):
        store.sglang_request("one", "<|media_pad|>", tokenizer)


# --- vLLM ---------------------------------------------------------------------------------------------------------


class Range(NamedTuple):
    offset: int
    length: int


class Fields:
    """Stands in for MultiModalFieldConfig: keeps how a field is cut."""

    @staticmethod
    def flat_from_sizes(modality: str, sizes: torch.Tensor) -> Any:
        return modality, sizes.tolist()

    @staticmethod
    def batched(modality: str, *, keep_on_cpu: bool) -> Any:
        return modality, keep_on_cpu


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that vLLM is asked for; scripts/vllm_check.py builds the same with its released classes."""
    engine, inputs = types.ModuleType("vllm.inputs.engine"), types.ModuleType("vllm.multimodal.inputs")
    engine.mm_input = lambda *arguments: arguments  # type: ignore[attr-defined]
    inputs.MultiModalFieldConfig = Fields  # type: ignore[attr-defined]
    inputs.PlaceholderRange = Range  # type: ignore[attr-defined]
    inputs.MultiModalKwargsItems = types.SimpleNamespace(  # type: ignore[attr-defined]
        from_hf_inputs=lambda features, fields: (dict(features), fields)
    )
    for name in ("vllm", "vllm.inputs", "vllm.multimodal"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", engine)
    monkeypatch.setitem(sys.modules, "vllm.multimodal.inputs", inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("vllm")
def test_vllm_gets_the_levels_whatever_the_shards_hold(made: Path, tokenizer: Any, dtype: str) -> None:
    store = FeatureStore(made / dtype)
    ids = store.prompt_ids(["one", "two"], "<|media_pad|>, <|media_pad|>", tokenizer)
    prompt_ids, (features, fields), hashes, ranges = store.vllm_inputs(["one", "two"], ids)
    levels = FeatureStore(made / "uint8", raw=True).batch(["one", "two"])
    assert prompt_ids == ids
    assert features["pixel_values"].dtype == torch.uint8
    assert torch.equal(features["pixel_values"], levels.pixel_values)
    assert torch.equal(features["grid_thws"], levels.grid_thws)
    assert fields == {"pixel_values": ("image", [24, 32]), "grid_thws": ("image", True)}
    pad = tokenizer.convert_tokens_to_ids("<|media_pad|>")
    places = [i for i, number in enumerate(ids) if number == pad]
    assert ranges == {"image": [(places[0], 6), (places[6], 8)]}
    assert len(set(hashes["image"])) == 2
    assert store.vllm_inputs(["one", "two"], ids, pad_id=pad)[2] == hashes
    values = store.vllm_inputs(["one", "two"], ids, normalised=True)
    assert torch.equal(values[1][0]["pixel_values"], store.batch(["one", "two"]).pixel_values.to(torch.bfloat16))
    assert not set(values[2]["image"]) & set(hashes["image"])


@pytest.mark.usefixtures("vllm")
def test_a_store_of_raw_levels_can_give_values_too(made: Path) -> None:
    raw, plain = FeatureStore(made / "uint8", raw=True), FeatureStore(made / "uint8", dtype="bfloat16")
    pixels = raw.vllm_inputs(["one"], [9] * 6, normalised=True)[1][0]["pixel_values"]
    assert torch.equal(pixels, plain["one"].pixel_values)


@pytest.mark.usefixtures("vllm")
def test_ids_that_do_not_fit_the_images_are_refused(made: Path) -> None:
    store = FeatureStore(made / "uint8")
    for ids, pad, what in [
        ([1, 9, 9, 9, 2], None, "no id has runs as long as the images; expected a pad for each token of each image: 6"),
        ([9] * 5 + [1] + [9], None, "no id has runs"),
        ([8] * 6 + [9] * 6, None, "several ids could be the pad"),
        ([8] * 6 + [9] * 5, 9, "the runs of id 9 are of other lengths"),
    ]:
        with pytest.raises(InputError, match=what):
            store.vllm_inputs(["one"], ids, pad_id=pad)
    assert store.vllm_inputs(["one"], [8] * 6 + [9] * 6, pad_id=9)[3] == {"image": [(6, 6)]}


@pytest.mark.usefixtures("vllm")
def test_values_between_the_levels_are_not_rounded_in_silence(tmp_path: Path) -> None:
    values = np.full((4, 3, 14, 14), 0.3, np.float32)
    np.save(tmp_path / "own.npy", values)
    row = {"id": "own", "features": "own.npy", "grid_thw": [1, 2, 2], "width": 20, "height": 20}
    manifest = write_manifest(tmp_path / "m.jsonl", [row])
    prepare(Settings(str(manifest), tmp_path / "out", "kimi-k3", "cpu"), Silent())
    with pytest.raises(InputError, match=r"2,352 of these values are none .encode with --dtype uint8"):
        FeatureStore(tmp_path / "out").vllm_inputs(["own"], [9])


def test_without_vllm_the_sentence_says_what_to_install(made: Path) -> None:
    with pytest.raises(InputError, match=r"vllm: it is not installed.*pip install vllm"):
        FeatureStore(made / "uint8").vllm_inputs(["one"], [9] * 6)
