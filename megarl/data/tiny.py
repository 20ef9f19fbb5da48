"""The quickstart's model and task: a tiny Qwen3-MoE, or a dense model, with a character tokenizer, and sorting digits.

The task is to sort digits, ``528104=`` -> ``012458``. Some demonstrations are sorted in descending order. A model
trained on these demonstrations does both, and solves about ``1 - wrong_share`` of the problems. RL then selects the
correct behaviour. The task shows that the RL loop works, not that RL teaches a new skill.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megarl.data.records import write_jsonl
from megarl.errors import DataError, refuse_if
from megarl.files.texts import read_table

CHARACTERS = "0123456789=+-*/ ,.:?()abcdefgh"
"""The 30 characters of the vocabulary; with pad (id 0) and end (id 1) it has 32 tokens."""
PAD_ID, EOS_ID = 0, 1
_SIZES: dict[str, dict[str, tuple[str, Any]]] = read_table(__file__)
"""Name -> (Hugging Face's name, default), of all families and of experts."""
Family = Literal["qwen3_moe", "qwen3", "qwen2", "llama"]


def write_tiny_model(path: str | Path, *, seed: int = 0, family: Family = "qwen3_moe", **sizes: Any) -> Path:
    """Write a randomly initialised fp32 model and its character tokenizer in Hugging Face format.

    The folder (config, safetensors with one tensor per expert, tokenizer) appears complete or not at all. The same seed
    gives the same weights, and torch's global generator does not change. sizes: others than those of tiny.toml;
    ``dense_layers`` have a plain MLP instead of experts. DataError if ``path`` is not empty, TypeError for an unknown
    size.
    """
    target = Path(path)
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{target} already exists and is not an empty directory: remove it or choose another path")

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    sizes["dense_layers"] = [*sizes.get("dense_layers", ())]  # transformers takes lists only
    if unknown := sizes.keys() - _SIZES["all"].keys() - _SIZES["experts"].keys():
        raise TypeError(f"found the sizes {unknown}, expected those of {[*_SIZES['all'], *_SIZES['experts']]}")
    rows = _SIZES["all"] | (_SIZES["experts"] if family == "qwen3_moe" else {})
    values = {hf: sizes.get(name, default) for name, (hf, default) in rows.items()}
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    values |= {"intermediate_size": 2 * hidden, "head_dim": hidden // heads, "vocab_size": len(CHARACTERS) + 2}
    tokens = {"pad_token_id": PAD_ID, "eos_token_id": EOS_ID, "bos_token_id": None}
    config = AutoConfig.for_model(family, **values, **tokens, tie_word_embeddings=False, dtype="float32")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True) as made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config)
            # A random model samples the pad token too. transformers sets the pad embedding to zero, where the gradient
            # of a norm is 1 / sqrt(eps), a thousand times larger. After clipping, only this row would be updated.
            with torch.no_grad():
                model.get_input_embeddings().weight[PAD_ID].normal_(0.0, values["initializer_range"])
        logging.disable_progress_bar()  # for a single small file
        model.save_pretrained(made)
        _save_tokenizer(made, values["max_position_embeddings"])
        os.chmod(made, 0o755)  # a temporary folder is private
        os.replace(made, target)  # replaces an empty folder in a single step
    return target


def write_sort_task(
    path: str | Path, *,
    seed: int = 0, num_train: int = 4096, num_heldout: int = 256, num_demonstrations: int = 38400, digits: int = 6,
    wrong_share: float = 0.55,
) -> None:  # fmt: skip
    """Write train.jsonl, heldout.jsonl and demonstrations.jsonl of the sorting task into the folder ``path``.

    Lines are {"prompt", "answer"} in the first two files, {"prompt", "response"} in the third file. All prompts differ.
    Prompts of a single repeated digit are left out, because both orders are correct.

    wrong_share: exactly this share of the demonstrations, at random places, is sorted in descending order.

    Each file is replaced atomically. DataError if there are not enough prompts.
    """
    counts = (num_train, num_heldout, num_demonstrations)
    available = 10**digits - 10
    refuse_if(sum(counts) > available, DataError, "sort_task", asked=sum(counts), available=available, digits=digits)
    rng = np.random.default_rng(seed)
    drawn = rng.choice(10**digits, size=min(sum(counts) + 10, 10**digits), replace=False).tolist()
    numbers = [number for n in drawn if len(set(number := f"{n:0{digits}d}")) > 1]  # at most ten are left out
    train, heldout, shown = np.split(numbers[: sum(counts)], np.cumsum(counts[:2]))
    is_wrong = np.arange(num_demonstrations) < round(wrong_share * num_demonstrations)
    rng.shuffle(is_wrong)
    folder = Path(path)
    for name, numbers in (("train", train), ("heldout", heldout)):
        write_jsonl(folder / f"{name}.jsonl", ({"prompt": f"{n}=", "answer": "".join(sorted(n))} for n in numbers))
    rows = zip(shown, is_wrong.tolist(), strict=True)
    demonstrations = ({"prompt": f"{n}=", "response": "".join(sorted(n, reverse=wrong))} for n, wrong in rows)
    write_jsonl(folder / "demonstrations.jsonl", demonstrations)


def _save_tokenizer(path: str, max_positions: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    # WordLevel without an unknown token raises on a foreign character, which BPE would drop silently.
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    options: Any = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    options |= {"model_max_length": max_positions, "clean_up_tokenization_spaces": False}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(path)
