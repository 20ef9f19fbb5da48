"""Small tokenizers of the kinds that released models have, with the chat templates that their folders have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_SPLIT = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THINK = ("<think>", "</think>")

CHAT_ML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + "
    "'<|eot_id|>' %}{% if loop.first %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' %}<think></think>\n{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
DEEPSEEK_V2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n"
    "{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
KIMI = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>You are an "
    "assistant<|im_end|>{% endif %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
MIXTRAL = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "other": _THINK, "template": CHAT_ML},
    "llama3": {
        "special": ["<|begin|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        "template": LLAMA_3,
        "prefix": ["<|begin|>"],
    },
    "glm4_moe": {
        "special": ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"],
        "other": _THINK,
        "template": GLM,
        "prefix": ["[gMASK]", "<sop>"],
    },
    "deepseek_v3": {
        "special": ["<｜begin｜>", "<｜end｜>"],
        "other": ("<｜User｜>", "<｜Assistant｜>", *_THINK),
        "template": DEEPSEEK_R1,
        "prefix": ["<｜begin｜>"],
    },
    "deepseek_v2": {"special": ["<｜begin｜>", "<｜end｜>"], "template": DEEPSEEK_V2, "prefix": ["<｜begin｜>"]},
    "kimi_k2": {
        "special": ["<|im_end|>", "<|im_middle|>", *(f"<|im_{role}|>" for role in ("system", "user", "assistant"))],
        "template": KIMI,
    },
    "mixtral": {"special": ["<s>", "</s>"], "template": MIXTRAL, "prefix": ["<s>"], "sentencepiece": True},
}
"""Special tokens: the first is the begin token if a prefix has it, else the end token. Other tokens are added, too."""


def byte_level() -> Tokenizer:
    """As Qwen, Llama 3, GLM and DeepSeek have it: all bytes, and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("12", "3"), ("Ġ", "Ġ"), ("Ċ", "Ċ")]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mixtral have it: a blank before the text, and bytes for other characters."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "▁t", "he"]
    vocabulary = {token: number for number, token in enumerate(letters)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=[("▁", "t"), ("h", "e")], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return tokenizer


def write_family(folder: Path, name: str, *, num_rows: int | None = None, **config: Any) -> Path:
    """Write tokenizer.json, tokenizer_config.json and config.json as such a model has them; return the folder.

    num_rows: ``vocab_size`` of the model; default one for each token. config: more of tokenizer_config.json.
    """
    settings = FAMILIES[name]
    tokenizer = sentencepiece() if settings.get("sentencepiece") else byte_level()
    special, prefix = settings["special"], settings.get("prefix", [])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in settings.get("other", ())])
    if prefix:
        pairs = [(token, tokenizer.token_to_id(token)) for token in prefix]
        tokenizer.post_processor = processors.TemplateProcessing(single=" ".join([*prefix, "$A"]), special_tokens=pairs)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    is_begin = special[0] in prefix and len(prefix) == 1
    table = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(token.pop("id")): token for token in added},
        "eos_token": special[1] if is_begin else special[0],
        **({"bos_token": special[0]} if is_begin else {}),
        **({"unk_token": "<unk>"} if settings.get("sentencepiece") else {}),
        "chat_template": settings["template"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(table | config, ensure_ascii=False))
    rows = tokenizer.get_vocab_size() if num_rows is None else num_rows
    model_type = {"qwen3": "qwen3_moe", "llama3": "llama", "deepseek_v2": "deepseek_v3"}.get(name, name)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": rows}))
    return folder
