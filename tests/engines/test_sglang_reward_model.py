"""The reward function that asks a reward model, against SGLang's own /classify and the same model in transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from sglang_fixtures import START_DEADLINE_S
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from megarl.config.tables.data import RewardModelConfig
from megarl.data.judge import Judge
from megarl.data.reward_model import RewardModel
from megarl.data.rewards import Verdict
from megarl.data.tiny import write_tiny_model
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec


@pytest.mark.sglang
@pytest.mark.slow
def test_the_scores_are_those_of_the_model(
    sglang_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(tmp_path / "policy", num_layers=1))
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(config).float().eval()
    # SGLang's head has a bias, which such checkpoints lack: a random one, unless the file has it.
    model.save_pretrained(tmp_path / "model", state_dict=model.state_dict() | {"score.bias": torch.zeros(1)})
    tokenizer.save_pretrained(tmp_path / "model")

    def scores(*texts: str) -> list[float]:
        with torch.no_grad():
            return [float(model(torch.tensor([tokenizer(text)["input_ids"]])).logits) for text in texts]

    spec = ServerSpec(
        tmp_path / "model",
        sglang_python,
        dtype="float32",
        log_file=tmp_path / "server.log",
        max_total_tokens=4096,
        api_key="the key",
        routes=False,
        extra_args=("--is-embedding",),
    )
    monkeypatch.setenv("RM_KEY", "the key")
    texts = [f"{i}*{i}={i * i}" for i in range(20)]
    with Server(spec) as server:
        server.wait_ready(START_DEADLINE_S)
        settings = RewardModelConfig(urls=[server.url], api_key_env="RM_KEY")
        found = [asyncio.run(RewardModel(settings).score(text)) for text in texts]
        with Judge("reward_model", model=settings) as judge:
            verdict = asyncio.run(judge.score(prompt="3*4=", response="4+4+4,12", answer=""))
            refused = asyncio.run(judge.score(prompt="", response="unknown letters", answer=""))
    assert found == pytest.approx(scores(*texts), abs=1e-4)
    assert [verdict.reward] == pytest.approx(scores("3*4=4+4+4,12"), abs=1e-4)
    assert max(found) - min(found) > 0.1
    assert refused == Verdict(None, error=refused.error, may_pass=True)
