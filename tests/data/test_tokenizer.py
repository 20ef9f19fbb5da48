"""A tokenizer is what its folder says, or it is refused: ids, special tokens, text, and the folder's own code."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers.dynamic_module_utils
from families import FAMILIES, write_family
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.data.tokenizer import load_tokenizer, tokenize
from megarl.errors import ConfigError

TEXT = "The answer: 1234,\n\n  Größe 你好 🙂 def f(x):\n\treturn {'a': x}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_each_family_is_read_as_tokenizer_json_says(family: str, tmp_path: Path) -> None:
    """transformers would rebuild some of them by the rules of a class; ``tokenizers`` alone is the oracle."""
    for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"):
        folder = write_family(tmp_path / name, family, tokenizer_class=name)
        tokenizer = load_tokenizer(folder, "model.path")
        oracle = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for text in (TEXT, f" {TEXT}", *FAMILIES[family]["special"]):
            for special in (True, False):
                assert tokenize(tokenizer, [text], special) == [oracle.encode(text, add_special_tokens=special).ids]
        assert tokenizer.decode(tokenize(tokenizer, [TEXT], False)[0]) == TEXT


def test_what_a_vocabulary_does_not_hold_and_what_is_normalised_is_no_mistake(tmp_path: Path) -> None:
    """No token for most bytes, and none that says so: BPE leaves them out."""
    letters = [*map(chr, range(97, 123)), "Ġ", "Ã", "©"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<unk>").save_pretrained(tmp_path)
    load_tokenizer(tmp_path, "model.path")


def _edit(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads((folder / name).read_text())
    change(table)
    (folder / name).write_text(json.dumps(table))


NO_LINES = {"type": "Replace", "pattern": {"String": "\n"}, "content": ""}


def _swap(table: dict[str, Any]) -> None:
    decoder = table["added_tokens_decoder"]
    first, second, *_ = decoder
    decoder[first], decoder[second] = decoder[second], decoder[first]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("tokenizer_config.json", _swap, r"config\.json says that '<\|im_start\|>' is token 263, but it is 264"),
        ("tokenizer.json", lambda table: table.pop("decoder"), "comes back as .T h e"),
        ("tokenizer_config.json", lambda table: table.update(split_special_tokens=True), "is encoded as"),
        ("tokenizer.json", lambda table: table.update(normalizer=NO_LINES), None),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_not_what_the_folder_says_is_refused(
    name: str, change: Callable[[dict[str, Any]], object], told: str | None, tmp_path: Path
) -> None:
    """A normalizer may change text: that is what the file says."""
    _edit(write_family(tmp_path, "qwen3"), name, change)
    if told is None:
        load_tokenizer(tmp_path, "model.path")
        return
    with pytest.raises(ConfigError, match=told) as caught:
        load_tokenizer(tmp_path, "--model")
    assert str(caught.value).startswith(f"--model: the tokenizer of {tmp_path} is not what its files say: ")


MERGED = [b" t", b"he", b" the", b"12", b"123"]
SPECIAL = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "[EOT]": 7, "[PAD]": 17}
CODE = """
import base64
from pathlib import Path
from transformers import PreTrainedTokenizer

NAMES = {NAMES}

class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **kwargs):
        lines = [line.split() for line in Path(vocab_file).read_text().splitlines()]
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self.names = {rank: token.decode("latin-1") for token, rank in self.ranks.items()}
        self.names |= {len(self.ranks) + place: name for name, place in NAMES.items()}
        self.ids = {name: rank for rank, name in self.names.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.ranks) + 256

    def get_vocab(self):
        return self.ids

    def _tokenize(self, text, **kwargs):
        return [bytes([byte]).decode("latin-1") for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.ids[token]

    def _convert_id_to_token(self, index):
        return self.names[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).encode("latin-1").decode(errors="replace")
"""


@pytest.fixture
def tiktoken_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As Moonlight and Kimi-K2 have it: ranks, special tokens with gaps between their ids, and code."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    pieces = [*(bytes([byte]) for byte in range(256)), *MERGED]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenization_moonshot.py").write_text(CODE.replace("{NAMES}", repr(SPECIAL)))
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    decoder = {str(len(pieces) + place): {"content": name, **flags} for name, place in SPECIAL.items()}
    table = {
        "added_tokens_decoder": decoder,
        "additional_special_tokens": [*SPECIAL][2:],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "vocab_size": len(pieces) + 256}))
    return folder


def test_code_of_the_folder_runs_only_if_the_user_trusts_it(tiktoken_folder: Path) -> None:
    told = r"says that '.*' is token \d+, but it is \d+ \(and \d+ more\); its tokenizer .*"
    told += r"tokenization_moonshot\.TikTokenTokenizer: read it, then pass --trust"
    with pytest.raises(ConfigError, match=told):  # what transformers guesses is not taken
        load_tokenizer(tiktoken_folder, "model.path")
    assert not (tiktoken_folder.parent / "modules").exists()
    tokenizer = load_tokenizer(tiktoken_folder, "model.path", trust=True)
    first = 256 + len(MERGED)
    assert tokenizer.convert_tokens_to_ids([*SPECIAL]) == [first + place for place in SPECIAL.values()]
    ids = tokenize(tokenizer, [f"<|im_user|>{TEXT}<|im_end|>"], True)[0]
    assert ids == [first + 3, *TEXT.encode(), first + 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
