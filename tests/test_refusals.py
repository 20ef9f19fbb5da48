"""What a configuration is refused for: rows of overrides of the smallest run, and parts of the line that says so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from run_configs import SMALLEST, parsed, read_rows, read_words, refusal

import megarl.config
from megarl.config.file import parse
from megarl.errors import ConfigError

CONFIG = Path(megarl.config.__file__).parent
ROWS = r"""
rollout.temprature=1.0 | rollout.temprature: unknown key | did you mean rollout.temperature?
temperature=1.0 | temperature: unknown key | rollout.temperature or eval.temperature
'optim={}' | optim.lr: missing | pass as flags
'parallel={}' data=1 reward=2 | 2 problems | data: found 1 | a table [data] | reward: found 2
rollout.temperature=0.0 | rollout.temperature: found 0.0
rollout.temperature=a run.steps=0 | run.steps | rollout.temperature | 2 problems
data.heldout_split=test | heldout_split: found "test", which goes only with heldout
'run.steps="3"' | run.steps: found '3' | a whole number
optim.min_lr=1.0 | optim.min_lr: found 1.0 | at most lr
optim.warmup_steps=5 optim.decay_steps=5 | optim.warmup_steps: found 5 | decay_steps = 5
model=3 | model: found 3 | a table [model]
model.path.deeper=3 | model.path.deeper | a table was expected
parallel.tp=2 parallel.etp=1 | parallel.etp: found 1 with tp = 2 and ep = 1
parallel.etp=2 parallel.ep=2 | parallel.etp: found 2 with tp = 1
parallel.vpp=2 | parallel.vpp: found 2, which goes only with pp > 1
train.objective=ppo2 | train.objective: found 'ppo2' | did you mean
'train.objective_overrides={"mask" = 1}' | train.objective_overrides: mask: unknown part | mean masks?
'train.objective_overrides={"advantage" = "off"}' | advantage is None | 'group_mean'
'train.objective_overrides={"factors" = {"1" = {"policies" = "old_mu"}}}'
    | 'theta_mu' and 'old_mu' count the same policy twice
train.objective=dppo_topk | train.objective: found "dppo_topk" | use dppo_tv
'train.objective_overrides={"kl_coef" = 0.1}' | kl_coef is 0.1 | A KL in the loss is a penalty
train.objective=kl_grpo 'train.objective_overrides={"selection" = "positive"}' | selection 'positive' | 'mixed_groups'
train.replay=r4 | train.replay: found 'r4' | expected none, r2 or r3
train.micro_batch_tokens=25 | train.micro_batch_tokens: found 25 | at least | = 26
train.micro_batch_tokens=27 parallel.tp=2 | train.micro_batch_tokens: found 27 | multiple of parallel.tp
train.mini_batches=3 | train.mini_batches: found 3 | divisor | 256
eval.every=3 | eval.every: found 3 without data.heldout
'eval.sets={"pooled" = "a.jsonl"}' | eval.sets: found the name pooled
checkpoint.every=2 checkpoint.keep_every=3
    | checkpoint.keep_every: found 3, expected a multiple of checkpoint.every = 2
checkpoint.keep_every=3 | checkpoint.keep_every: found 3 | checkpoint.every = 0
reward.function=reward_model | reward_model.urls: found [] | with reward.function = "reward_model"
'reward_model.urls=["http://a:1"]' | reward_model.urls: found ['http://a:1'] | "exact_match"
rollout.engine=sglang sglang.deltas=true sglang.sync=disk | sglang.deltas: found true | sglang.sync = "disk"
rollout.engine=sglang sglang.deltas=true sglang.spare_weights=none | sglang.deltas: found true | "memory"
sglang.deltas=true | sglang.deltas: found true | rollout.engine = "local"
recompute.granularity=full | recompute.granularity: found "full" without method
recompute.num_layers=1 | recompute.num_layers: found 1, which goes only with
'recompute.modules=["moe"]' | recompute.modules: found ["moe"], which goes only with
'sft={"steps" = 3}' | sft.lr, sft.data, sft.batch_size: missing
megatron.num_layers=4 | megatron.num_layers | use model.path instead
megatron.moe_expert_capacity_factor=a | megatron.moe_expert_capacity_factor: found 'a' | number
train.old_logprobs=rollout train.replay=r2 | train.old_logprobs: found "rollout" with | train.replay = "r2"
    | there is none
train.old_logprobs=rollout train.objective=kl_grpo 'train.objective_overrides={"kl_coef" = 0.1}'
    | train.old_logprobs: found "rollout" with | "token_level_kl" | before the first update
train.old_logprobs=rollout 'train.objective_overrides={"factors" = [{"policies" = "old_mu"}]}'
    | train.old_logprobs: found "rollout" with | objective "minirl" | nothing to correct
train.old_logprobs=rollout log.traces_every=2 train.mini_batches=2 | with | log.traces_every = 2 | mini_batches = 2
'sglang.urls=["127.0.0.1:30000"]' | sglang.urls: found 127.0.0.1:30000
'sglang.urls=["http://a:1", "http://a:1"]' | expected each server once
'sglang.urls=["http://a:port"]' | sglang.urls: found http://a:port, expected each server once, as http://ho
'sglang.urls=["http://a:1"]' 'sglang.gpus=[0]' | sglang.gpus: found together with urls
'sglang.gpus=[0, 0]' sglang.servers=2 | expected each GPU once
rollout.one_step_off=true | rollout.one_step_off: found true | engine = "sglang"
rollout.reread=ask | rollout.reread: found "ask" | servers, whose memory may be full
rollout.max_staleness=1 rollout.engine=sglang rollout.one_step_off=true | goes only with max_staleness = 0
rollout.window=0.5 | rollout.window: found 0.5 | max_staleness above 0
rollout.max_staleness=1 sampling.refill=true | rollout.max_staleness: found 1 | chooses by reward
rollout.max_staleness=1 'environment.tools=["calculator"]' environment.function=tools | cannot be paused
rollout.max_staleness=1 rollout.engine=sglang sglang.release_memory=true | rollout.max_staleness = 0
sglang.fp8=true rollout.dtype=fp32 | whose kernels compute in bf16 only
sglang.fp8=true rollout.fp8_rounding=true | whose weights are in FP8 already
rollout.fp8_activations=true | rollout.fp8_activations: found true, which goes only with fp8_rounding
rollout.engine=sglang rollout.fp8_rounding=true rollout.fp8_activations=true
    | rollout.fp8_activations: found true | an engine that can round so
rollout.engine=sglang sglang.sync=ipc 'sglang.urls=["http://a:1"]' | sglang.sync: found "ipc" with sglang.urls
rollout.engine=sglang sglang.sync=ipc launch.layout=disaggregated launch.server_nodes=1
    | sglang.sync: found "ipc" with launch.layout = "disaggregated"
rollout.engine=sglang sglang.sync=distributed 'sglang.gpus=[0]' | NCCL refuses two ranks on one GPU
sampling.rule=dapo | sampling.rule
sampling.round_size=0 sampling.max_samples=0 sampling.keep=last sampling.advantages=mine
    | 4 problems | sampling.round_size | sampling.max_samples | sampling.keep | sampling.advantages
sampling.positives=2 | positives: found 2 with rule = "uniform", which has no use for it here
sampling.rule=ada_seq_pos sampling.negatives=2
    | negatives: found 2 with rule = "ada_seq_pos", which has no use for it here
sampling.round_size=3 | round_size: found 3 with rule = "uniform"
sampling.rule=gvm sampling.max_samples=9 | max_samples: found 9 with rule = "gvm"
sampling.subsample=pos | subsample: found pos with rule = "uniform"
sampling.rule=gvm sampling.train_size=4 | train_size: found 4 with rule = "gvm", which has no use for it here
'sampling.tiers=[4, 8]' | tiers: found [4, 8] with rule = "uniform", which has no use for it here
sampling.rule=tiers 'sampling.tiers=[8, 4]' | tiers are (8, 4), expected to rise
estimate.objective=inverse:0 | or "inverse:A", or "ada_est"
sampling.keep=random | keep: found random with rule = "uniform"
estimate.decay=0.1 | estimate: found with sampling.rule = "uniform", but only "ada_est" reads
credit.scale=std | credit.scale: found 'std', but advantages are the objective's
sampling.rule=ada_est sampling.refill=true | refill: found true | a rule that chooses no prompts before the step
sampling.max_prompts=64 | max_prompts: found 64, which goes only with refill = true; set that, or remove it
sampling.spare=-1 sampling.refill=true | sampling.spare
sampling.train_size=9 | sampling: Uniform: train_size is 9, expected 1 to 8, the samples of a prompt
sampling.rule=ada_seq_pos sampling.positives=0 | sampling: Sequential: 0 positives and 0 negatives to exit
sampling.rule=ada_seq_balance sampling.positives=30 sampling.negatives=3
    | 30 positives and 3 negatives to exit, expected at least one and at most max_samples = 32
estimate.objective=entropy | or "ada_est"
estimate.by=guess estimate.eps=0.0 estimate.decay=1.5 estimate.prior_positives=0.0 estimate.prior_negatives=-1.0
    | 5 problems | estimate.by | estimate.eps | estimate.decay | estimate.prior_positives | estimate.prior_negatives
sampling.rule=ada_est sampling.max_samples=7 | rollout.group_size: found 8, the mean number
    | expected estimate.min_samples = 1 to sampling.max_samples = 7
sampling.rule=ada_est estimate.min_samples=9 | expected estimate.min_samples = 9 to sampling.max_samples = 32
gvm.beta=1.5 gvm.alpha=-0.001 gvm.pre_samples=0 gvm.refresh_every=0
    | 4 problems | gvm.beta | gvm.alpha | gvm.pre_samples | gvm.refresh_every
credit.objective=entropy | sampling: objective 'entropy' is unknown
credit.scale=variance credit.ddof=2 credit.floor=0.0 credit.rate_eps=-1.0 credit.weigh=token
    | 5 problems | credit.scale | credit.ddof | credit.floor | credit.rate_eps | credit.weigh
environment.function=tools | tools: found [] with function = 'tools'; name tools, with function
'environment.tools=["calculator"]' | tools: found ['calculator'] with function = None
environment.function=tools 'environment.tools=["calculator", "python"]'
    | tools: found several with format = "block", which names none; use format = "hermes"
environment.function=tools 'environment.tools=["calculator"]' environment.observation=none
    | observation: found 'none', expected {output} in it
environment.max_turns=3 | function: missing beside other keys; it says what the environment is
environment.concurrency=0 | environment.concurrency
sampling.refill=true sampling.max_prompts=31
    | sampling.max_prompts: found 31, expected at least rollout.prompts_per_step = 32
sampling.rule=ada_seq_pos train.mini_batches=33
    | train.mini_batches: found 33, expected at most rollout.prompts_per_step = 32: this sampling makes
sampling.rule=ada_seq_balance train.objective=kl_grpo
    | sampling.advantages: found "credit" (the default with rule = "ada_seq_balance")
credit.weigh=prompt train.objective=kl_grpo
    | credit: its weights do not go with an objective whose advantages differ between tokens
'train.objective_overrides={"advantage" = "gdpo"}'
    | reward.weights: found none with advantage 'gdpo', which standardises several rewards one by one
'reward.weights={"right" = 1.0}' | reward.weights: found {"right": 1.0}, which goes only with a function of your own
'reward.weights={"right" = inf}' reward.function=rewards:mine | reward.weights
sampling.train_size=1 sampling.advantages=objective | sampling.train_size: found 1 response to a prompt with
sampling.train_size=1 | allowed
sampling.train_size=1 sampling.advantages=credit credit.statistics=trained
    | sampling.train_size: found 1 response to a prompt with
sampling.train_size=1 'train.objective_overrides={"selection" = "mixed_groups"}'
    | train_size: found 1 response to a prompt with
rollout.group_size=1 'train.objective_overrides={"advantage" = "raw"}' sampling.refill=true
    | rollout.group_size: found 1 response to a prompt with
rollout.group_size=1 sampling.rule=ada_est | rollout.group_size: found 1 response to a prompt with
rollout.group_size=1 sampling.rule=ada_seq_pos | allowed
rollout.group_size=1 sampling.rule=ada_seq_pos sampling.max_samples=1
    | sampling.max_samples: found 1 response to a prompt with
rollout.group_size=1 sampling.rule=ada_seq_pos sampling.round_size=1 | allowed
rollout.group_size=1 sampling.rule=ada_seq_pos sampling.advantages=credit credit.statistics=trained
    | rollout.group_size: found 1 response to a prompt with
sampling.rule=tiers 'sampling.tiers=[1]' sampling.train_size=1 | sampling.tiers: found 1 response to a prompt with
sampling.rule=tiers 'sampling.tiers=[1, 2]' sampling.train_size=1 | allowed
rollout.group_size=1 'train.objective_overrides={"advantage" = "reinforce_pp"}' rollout.prompts_per_step=1
    | rollout.group_size: found 1 response to a prompt with
rollout.group_size=1 train.objective=flash_reinforce | allowed
rollout.group_size=1 train.objective=flash_reinforce rollout.prompts_per_step=1 train.mini_batches=1
    | rollout.group_size: found 1 response to a prompt with | 'batch_mean'
rollout.group_size=1 train.objective=flash_reinforce sampling.refill=true
    | rollout.group_size: found 1 response to a prompt with | sampling.refill = true
rollout.group_size=1 'train.objective_overrides={"entropy_coef" = 0.1}'
    | rollout.group_size: found 1 response to a prompt with
sampling.rule=ada_seq_balance train.objective=kl_grpo sampling.advantages=objective | allowed
sampling.rule=gvm train.objective=kl_grpo | allowed
sampling.refill=true train.mini_batches=32 | allowed
sampling.rule=ada_est sampling.max_samples=8 estimate.min_samples=8 | allowed
sampling.rule=ada_est sampling.train_size=4 sampling.subsample=any | allowed
'reward.weights={"right" = 1, "long" = -0.1}' reward.function=rewards:mine | allowed
log.traces_every=2 train.mini_batches=2 | allowed
sampling.rule=gvm gvm.max_samples=7 | gvm.max_samples: found 7, expected at least rollout.group_size = 8
train.objective=kl_grpo 'train.objective_overrides={kl_at = "theta"}' rollout.prompts_per_step=33 train.mini_batches=2
    | found kl_at = 'theta' with rollout.prompts_per_step = 33, expected a multiple of
megatron.overlap_param_gather=true parallel.distributed_optimizer=false
    | megatron.overlap_param_gather: found true | set parallel.distributed_optimizer = true
megatron.hidden_dropout=0.1 | megatron.hidden_dropout: found 0.1, expected 0
train.replay_gates=true | allowed
train.replay_gates=true train.replay=r2 | train.replay_gates: found true, which goes only with replay = "r3"
train.replay_indexer=true train.replay=none | train.replay_indexer: found true, which goes only with replay = "r3"
train.replay_indexer=true rollout.engine=sglang | allowed
train.replay_gates=true rollout.engine=sglang | rollout.engine = "sglang", which returns no gate weights
train.replay_reference=true | train.replay_reference: found true with train.replay = "r3" and objective "minirl"
train.replay_reference=true train.objective=kl_grpo train.replay=none | expected "r2" or "r3"
launch.layout=disaggregated launch.server_nodes=1 | launch.layout: found "disaggregated" | which has no servers
launch.nodes=2 | launch.nodes: found 2, which goes only with another layout than "local"
launch.layout=disaggregated | launch.server_nodes: found 0 with layout = "disaggregated", expected at least 1
launch.server_nodes=1 | launch.server_nodes: found 1 with layout = "local", expected 0
sglang.release_memory=true | sglang.release_memory: found true, expected servers that share the trainer's GPUs
rollout.engine=sglang sglang.release_memory=true sampling.rule=gvm | whose estimates need the policy
'megatron={"moe_router_fusion" = true}' | megatron.moe_router_fusion | set train.replay = "none"
'megatron={"cuda_graph_impl" = "transformer_engine", "cuda_graph_scope" = ["attn", "moe_router"]}'
    | megatron.cuda_graph_impl | set train.replay = "none"
'megatron={"cuda_graph_impl" = "local", "cuda_graph_scope" = "full_iteration"}' | megatron.cuda_graph_impl
    | set train.replay = "none"
'megatron={"moe_router_load_balancing_type" = ["seq_aux_loss"], "moe_aux_loss_coeff" = [0.1]}' | allowed
'megatron={"cuda_graph_impl" = "transformer_engine", "cuda_graph_scope" = ["attn"]}' | allowed
'megatron={moe_router_fusion = true}' train.replay=r2 | megatron.moe_router_fusion
'megatron={moe_router_fusion = true}' train.replay=none | allowed
sampling.rule=ada_seq_pos 'train.objective_overrides={advantage = "raft"}' | allowed
"""
SEVERAL = {"reward__function": "rewards:mine", "reward__weights": {"right": 1.0, "short": 0.5}}
ALONE = ("gdpo", "opo", "reinforce_pp", "reinforce_pp_baseline", "raw", "raw_mixed", "signed", "positive_part")
ALONE += ("batch_mean",)


@pytest.mark.parametrize(("overrides", "parts"), [(read_words(words), parts) for words, parts in read_rows(ROWS)])
def test_a_refusal_is_one_line_with_key_finding_and_remedy(overrides: dict[str, Any], parts: list[str]) -> None:
    if parts == ["allowed"]:
        parse(SMALLEST, overrides)
        return
    with pytest.raises(ConfigError) as caught:
        parse(SMALLEST, overrides)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", ALONE)
def test_credit_takes_no_advantage_that_subtracts_no_mean_of_the_prompt(name: str) -> None:
    changes = {"train__objective_overrides": {"advantage": name}, "sampling__rule": "ada_seq_pos", **SEVERAL}
    expected = f"with advantage '{name}', but [credit] subtracts the mean of the prompt's pool instead"
    assert expected in refusal(**changes)
    parsed(**changes, sampling__advantages="objective")
    if name != "gdpo":
        parsed(train__objective_overrides={"advantage": name}, reward__threshold=0.5)


def test_every_text_belongs_to_a_rule() -> None:
    texts = tomllib.loads((CONFIG / "refusals.toml").read_text("utf-8"))
    files = [*CONFIG.rglob("*.py"), CONFIG.parent / "models" / "fit.py"]
    sources = "\n".join(path.read_text("utf-8") for path in files)
    assert set(texts) == set(re.findall(r'row\(\s*"(\w+)"', sources)) | {name for name in texts if name[:6] == "dense_"}
