"""What a configuration is refused for: rows of overrides of the smallest run, and parts of the line that says so."""

from __future__ import annotations

from typing import Any

import pytest
from run_configs import SMALLEST, parsed, read_rows, read_words, refusal

from megarl.config.file import parse
from megarl.errors import ConfigError

ROWS = r"""
rollout.temprature=1.0 | rollout.temprature: unknown key | did you mean rollout.temperature?
temperature=1.0 | temperature: unknown key | rollout.temperature or eval.temperature
'optim={}' | optim.lr: missing | pass as flags
'parallel={}' data=1 reward=2 | 2 problems | data: found 1 | a table [data] | reward: found 2
rollout.temperature=a | rollout.temperature: found 'a' | number
rollout.temperature=0.0 | rollout.temperature: found 0.0
rollout.temperature=a run.steps=0 | run.steps | rollout.temperature | 2 problems
rollout.top_p=1.01 | rollout.top_p: found 1.01
data.heldout_split=test | heldout_split: found "test", which goes only with heldout
rollout.prompts_per_step=true | rollout.prompts_per_step: found True | integer
rollout.prompts_per_step=3.0 | rollout.prompts_per_step: found 3.0 | integer
'run.steps="3"' | run.steps: found '3' | integer
optim.lr=nan | optim.lr: found nan | finite
optim.lr=inf | optim.lr: found inf | finite
optim.min_lr=1.0 | optim.min_lr: found 1.0 | at most lr
optim.warmup_steps=5 optim.decay_steps=5 | optim.warmup_steps: found 5 | decay_steps = 5
model=3 | model: found 3 | a table [model]
model.path.deeper=3 | model.path.deeper | a table was expected
model.dtype=fp16 | model.dtype: found 'fp16' | 'fp32' or 'bf16'
parallel.tp=2 parallel.etp=1 | parallel.etp: found 1 with tp = 2 and ep = 1
parallel.etp=2 parallel.ep=2 | parallel.etp: found 2 with tp = 1
parallel.vpp=2 | parallel.vpp: found 2, which goes only with pp > 1
parallel.pp=2 parallel.vpp=1 | parallel.vpp: found 1
train.objective=ppo2 | train.objective: found 'ppo2' | minirl
'train.objective_overrides={"mask" = 1}' | train.objective_overrides: mask: unknown part | mean masks?
'train.objective_overrides={"masks" = [1]}' | objective_overrides: masks is (1,) | a table of Mask
'train.objective_overrides={"masks" = {"0" = {"hihg" = 1}}}' | train.objective_overrides: masks.0.hihg: unknown part
    | did you mean high?
'train.objective_overrides={"masks" = {"2" = {"high" = 1}}}' | masks.2: expected a number from 0 to 1
'train.objective_overrides={"masks" = [{"high" = 1}]}' | masks.0.policies: missing | 'theta_old'
'train.objective_overrides={"factors" = {"0" = {"high" = "x"}}}' | train.objective_overrides: factor: high is 'x'
    | finite number
'train.objective_overrides={"factors" = {"0" = {"high" = true}}}' | high is True | finite number
'train.objective_overrides={"std_eps" = nan}' | std_eps is nan | finite number
'train.objective_overrides={"gate" = "sapo"}' | gate is 'sapo' | a table of Gate
'train.objective_overrides={"gate" = {"kind" = "sapo"}}' | gate.positive: missing
'train.objective_overrides={"std_ddof" = 1.0}' | std_ddof is 1.0 | whole number
'train.objective_overrides={"aggregation" = "mean"}' | aggregation is 'mean' | 'token-mean'
'train.objective_overrides={"advantage" = "off"}' | advantage is None | 'group_mean'
'train.objective_overrides={"factors" = {"1" = {"policies" = "old_mu"}}}'
    | 'theta_mu' and 'old_mu' count the same policy twice
train.objective=dppo_topk | train.objective: found "dppo_topk" | use dppo_tv
'train.objective_overrides={"kl_coef" = 0.1}' | kl_coef is 0.1 | A KL in the loss is a penalty
train.objective=kl_grpo 'train.objective_overrides={"selection" = "positive"}' | selection 'positive' | 'mixed_groups'
train.replay=r4 | train.replay: found 'r4' | 'none', 'r2' or 'r3'
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
recompute.granularity=full | recompute.granularity: found "full" without method
recompute.num_layers=1 | recompute.num_layers: found 1, which goes only with
'recompute.modules=["moe"]' | recompute.modules: found ["moe"], which goes only with
'sft={"steps" = 3}' | sft.lr, sft.data, sft.batch_size: missing
megatron.num_layers=4 | megatron.num_layers | use model.path instead
megatron.tensor_model_parallel_size=2 | use parallel.tp instead
megatron.lr=2.0 | use optim.lr instead
megatron.bf16=true | use model.dtype instead
megatron.moe_expert_capacity_factor=a | megatron.moe_expert_capacity_factor: found 'a' | number
train.old_logprobs=rollout train.replay=r2 | train.old_logprobs: found "rollout" with | train.replay = "r2"
    | there is none
train.old_logprobs=rollout train.objective=kl_grpo 'train.objective_overrides={"kl_coef" = 0.1}'
    | train.old_logprobs: found "rollout" with | "token_level_kl" | before the first update
train.old_logprobs=rollout 'train.objective_overrides={"factors" = [{"policies" = "old_mu"}]}'
    | train.old_logprobs: found "rollout" with | objective "minirl" | nothing to correct
train.old_logprobs=rollout train.objective=icepop | train.old_logprobs: found "rollout" with | nothing to correct
train.old_logprobs=rollout train.objective=kpop | train.old_logprobs: found "rollout" with | objective "kpop"
    | nothing to correct
train.old_logprobs=rollout log.traces_every=2 train.mini_batches=2 | train.old_logprobs: found "rollout" with
    | log.traces_every = 2 | train.mini_batches = 2
'sglang.urls=["127.0.0.1:30000"]' | sglang.urls: found 127.0.0.1:30000
'sglang.urls=["http://127.0.0.1:30000/"]' | sglang.urls: found http://127.0.0.1:30000/
'sglang.urls=["http://a:1", "http://a:1"]' | expected each server once
'sglang.urls=["http://2001:db8::7:30000"]'
    | sglang.urls: found http://2001:db8::7:30000, expected each server once, as http://ho
'sglang.urls=["http://::1:30000"]' | sglang.urls: found http://::1:30000, expected each server once, as http://ho
'sglang.urls=["http://2001:db8::7"]' | sglang.urls: found http://2001:db8::7, expected each server once, as http://ho
'sglang.urls=["http://a:port"]' | sglang.urls: found http://a:port, expected each server once, as http://ho
'sglang.urls=["http://:30000"]' | sglang.urls: found http://:30000, expected each server once, as http://ho
'sglang.urls=["http://[::1:30000"]' | sglang.urls: found http://[::1:30000, expected each server once, as http://ho
'sglang.urls=["http://a:1"]' 'sglang.gpus=[0]' | sglang.gpus: found together with urls
'sglang.gpus=[0, 0]' sglang.servers=2 | expected each GPU once
rollout.one_step_off=true | rollout.one_step_off: found true | engine = "sglang"
sglang.fp8=true rollout.dtype=fp32 | whose kernels compute in bf16 only
sglang.fp8=true rollout.fp8_rounding=true | whose weights are in FP8 already
'sglang.gpus=[0, 1, 2]' sglang.tp=2 | sglang.gpus: found 3, expected servers * tp = 2
rollout.fp8_activations=true | rollout.fp8_activations: found true, which goes only with fp8_rounding
rollout.engine=sglang rollout.fp8_rounding=true rollout.fp8_activations=true
    | rollout.fp8_activations: found true | an engine that can round so
rollout.engine=sglang rollout.fp8_kv_cache=true | fp8_kv_cache: found true | an engine that can round so
rollout.engine=sglang sglang.sync=ipc 'sglang.urls=["http://a:1"]' | sglang.sync: found "ipc" with sglang.urls
rollout.engine=sglang sglang.sync=ipc launch.layout=disaggregated launch.server_nodes=1
    | sglang.sync: found "ipc" with launch.layout = "disaggregated"
rollout.engine=sglang sglang.sync=distributed 'sglang.gpus=[0]' | NCCL refuses two ranks on one GPU
sampling.rule=dapo | sampling.rule
sampling.positives=2 | positives: found 2 with rule = "uniform", which has no use for it here
sampling.rule=ada_est sampling.positives=2 | positives: found 2 with rule = "ada_est", which has no use for it here
sampling.rule=ada_seq_pos sampling.negatives=2
    | negatives: found 2 with rule = "ada_seq_pos", which has no use for it here
sampling.negatives=0 | negatives: found 0 with rule = "uniform"
sampling.round_size=3 | round_size: found 3 with rule = "uniform"
sampling.rule=gvm sampling.max_samples=9 | max_samples: found 9 with rule = "gvm"
'sampling.tiers=[4, 8]' | tiers: found [4, 8] with rule = "uniform", which has no use for it here
sampling.rule=tiers sampling.max_samples=9 | max_samples: found 9 with rule = "tiers"
sampling.rule=tiers 'sampling.tiers=[8, 4]' | tiers are (8, 4), expected to rise
estimate.objective=inverse:0 | or "inverse:A", or "ada_est"
sampling.keep=random | keep: found random with rule = "uniform"
sampling.subsample=pos | subsample: found pos with rule = "uniform"
estimate.decay=0.1 | estimate: found with sampling.rule = "uniform", but only "ada_est" reads
gvm.pre_samples=4 | gvm: found with sampling.rule = "uniform", but only "gvm" reads
credit.scale=std | credit.scale: found 'std', but advantages are the objective's
sampling.rule=gvm sampling.train_size=4 | train_size: found 4 with rule = "gvm", which has no use for it here
sampling.rule=ada_est sampling.refill=true
    | refill: found true | a rule that chooses no prompts before the step
sampling.rule=gvm sampling.refill=true | refill: found true | a rule that chooses no prompts
sampling.max_prompts=64 | max_prompts: found 64, which goes only with refill = true; set that, or remove it
sampling.spare=2 | spare: found 2, which goes only with refill = true; set that, or remove it
sampling.round_size=0 | sampling.round_size
sampling.max_samples=0 | sampling.max_samples
sampling.keep=last | sampling.keep
sampling.spare=-1 sampling.refill=true | sampling.spare
sampling.advantages=mine | sampling.advantages
sampling.train_size=9 | sampling: Uniform: train_size is 9, expected 1 to 8, the samples of a prompt
sampling.rule=ada_seq_pos sampling.train_size=40 | sampling: Sequential: train_size is 40, expected 1 to 32
sampling.rule=ada_seq_balance sampling.train_size=40
    | 20 positives and 20 negatives to exit, expected at least one and at most max_samples = 32 of them together
sampling.rule=ada_seq_pos sampling.max_samples=4 | sampling: Sequential: train_size is 8, expected 1 to 4
sampling.rule=ada_seq_pos sampling.positives=0 | sampling: Sequential: 0 positives and 0 negatives to exit
sampling.rule=ada_seq_balance sampling.positives=30 sampling.negatives=3
    | 30 positives and 3 negatives to exit, expected at least one and at most max_samples = 32
estimate.objective=entropy | or "ada_est"
estimate.by=guess | estimate.by
estimate.eps=0.0 | estimate.eps
estimate.decay=1.5 | estimate.decay
estimate.prior_positives=0.0 | estimate.prior_positives
estimate.prior_negatives=-1.0 | estimate.prior_negatives
sampling.rule=ada_est sampling.max_samples=7 | rollout.group_size: found 8, the mean number
    | expected estimate.min_samples = 1 to sampling.max_samples = 7
sampling.rule=ada_est estimate.min_samples=9 | expected estimate.min_samples = 9 to sampling.max_samples = 32
gvm.beta=1.5 | gvm.beta
gvm.alpha=-0.001 | gvm.alpha
gvm.pre_samples=0 | gvm.pre_samples
gvm.refresh_every=0 | gvm.refresh_every
credit.objective=entropy | sampling: objective 'entropy' is unknown
credit.scale=variance | credit.scale
credit.ddof=2 | credit.ddof
credit.floor=0.0 | credit.floor
credit.rate_eps=-1.0 | credit.rate_eps
credit.weigh=token | credit.weigh
environment.function=tools | tools: found [] with function = 'tools'; name tools, with function
'environment.tools=["calculator"]' | tools: found ['calculator'] with function = None
environment.function=tools 'environment.tools=["calculator", "python"]'
    | tools: found several with format = "block", which names none; use format = "hermes"
environment.function=tools 'environment.tools=["calculator"]' environment.observation=none
    | observation: found 'none', expected {output} in it
environment.max_turns=3 | function: missing beside other keys; it says what the environment is
environment.step_s=0.0 | environment.step_s
environment.concurrency=0 | environment.concurrency
sampling.refill=true sampling.max_prompts=31
    | sampling.max_prompts: found 31, expected at least rollout.prompts_per_step = 32
sampling.rule=ada_seq_pos train.mini_batches=33
    | train.mini_batches: found 33, expected at most rollout.prompts_per_step = 32: this sampling makes
sampling.train_size=4 train.mini_batches=64
    | train.mini_batches: found 64, expected at most rollout.prompts_per_step = 32
sampling.rule=ada_seq_balance train.objective=kl_grpo
    | sampling.advantages: found "credit" (the default with rule = "ada_seq_balance")
    | whose advantages differ between tokens, or are your own; set sampling.advantages = "objective"
sampling.advantages=credit train.objective=kl_grpo | sampling.advantages: found "credit"
credit.weigh=prompt train.objective=kl_grpo
    | credit: its weights do not go with an objective whose advantages differ between tokens
credit.objective=log train.objective=kl_grpo | credit: its weights do not go with an objective
'train.objective_overrides={"advantage" = "gdpo"}'
    | reward.weights: found none with advantage 'gdpo', which standardises several rewards one by one
'reward.weights={"right" = 1.0}' | reward.weights: found {"right": 1.0}, which goes only with a function of your own
'reward.weights={"right" = inf}' reward.function=rewards:mine | reward.weights
'reward.weights={"a/b" = 1.0}' reward.function=rewards:mine | reward.weights
rollout.group_size=1 | rollout.group_size: found 1 response to a prompt with
sampling.train_size=1 sampling.advantages=objective | sampling.train_size: found 1 response to a prompt with
sampling.train_size=1 | allowed
sampling.train_size=1 sampling.advantages=credit credit.statistics=trained
    | sampling.train_size: found 1 response to a prompt with
sampling.train_size=1 'train.objective_overrides={"selection" = "mixed_groups"}'
    | train_size: found 1 response to a prompt with
rollout.group_size=1 'train.objective_overrides={"advantage" = "raw"}' | allowed
rollout.group_size=1 'train.objective_overrides={"advantage" = "raw"}' sampling.refill=true
    | rollout.group_size: found 1 response to a prompt with
rollout.group_size=1 sampling.advantages=credit | rollout.group_size: found 1 response to a prompt with
rollout.group_size=1 sampling.rule=gvm | rollout.group_size: found 1 response to a prompt with
rollout.group_size=1 sampling.rule=gvm 'train.objective_overrides={"advantage" = "raw"}' | allowed
rollout.group_size=1 sampling.rule=ada_est | rollout.group_size: found 1 response to a prompt with
rollout.group_size=2 sampling.rule=ada_est | allowed
rollout.group_size=1 sampling.rule=ada_seq_pos | allowed
rollout.group_size=1 sampling.rule=ada_seq_pos sampling.max_samples=1
    | sampling.max_samples: found 1 response to a prompt with
rollout.group_size=1 sampling.rule=ada_seq_pos sampling.round_size=1 | allowed
rollout.group_size=1 sampling.rule=ada_seq_pos sampling.advantages=credit credit.statistics=trained
    | rollout.group_size: found 1 response to a prompt with
sampling.rule=tiers 'sampling.tiers=[1]' sampling.train_size=1 | sampling.tiers: found 1 response to a prompt with
sampling.rule=tiers 'sampling.tiers=[1, 2]' sampling.train_size=1 | allowed
rollout.group_size=1 train.objective=raft | allowed
rollout.group_size=1 'train.objective_overrides={"advantage" = "reinforce_pp"}' | allowed
rollout.group_size=1 'train.objective_overrides={"advantage" = "reinforce_pp"}' rollout.prompts_per_step=1
    | rollout.group_size: found 1 response to a prompt with
rollout.group_size=1 'train.objective_overrides={"entropy_coef" = 0.1}'
    | rollout.group_size: found 1 response to a prompt with
sampling.rule=ada_seq_balance train.objective=kl_grpo sampling.advantages=objective | allowed
sampling.rule=gvm train.objective=kl_grpo | allowed
sampling.refill=true train.mini_batches=32 | allowed
sampling.rule=ada_est sampling.max_samples=8 estimate.min_samples=8 | allowed
sampling.rule=ada_seq_pos sampling.max_samples=8 | allowed
 | allowed
sampling.rule=ada_est sampling.train_size=4 sampling.subsample=any | allowed
sampling.refill=true sampling.max_prompts=32 | allowed
'reward.weights={"right" = 1, "long" = -0.1}' reward.function=rewards:mine | allowed
log.traces_every=2 train.mini_batches=2 | allowed
sampling.rule=gvm gvm.max_samples=7 | gvm.max_samples: found 7, expected at least rollout.group_size = 8
train.objective=kl_grpo 'train.objective_overrides={kl_at = "theta"}' rollout.prompts_per_step=33 train.mini_batches=2
    | found kl_at = 'theta' with rollout.prompts_per_step = 33, expected a multiple of
megatron.overlap_param_gather=true parallel.distributed_optimizer=false
    | megatron.overlap_param_gather: found true | set parallel.distributed_optimizer = true
megatron.hidden_dropout=0.1 | megatron.hidden_dropout: found 0.1, expected 0
train.replay_reference=true | train.replay_reference: found true with train.replay = "r3" and objective "minirl"
train.replay_reference=true train.objective=kl_grpo train.replay=none | expected "r2" or "r3"
launch.layout=disaggregated launch.server_nodes=1 | launch.layout: found "disaggregated" | which has no servers
launch.nodes=2 | launch.nodes: found 2, which goes only with another layout than "local"
launch.layout=disaggregated | launch.server_nodes: found 0 with layout = "disaggregated", expected at least 1
launch.server_nodes=1 | launch.server_nodes: found 1 with layout = "local", expected 0
sglang.release_memory=true | sglang.release_memory: found true, expected servers that share the trainer's GPUs
rollout.engine=sglang sglang.release_memory=true sampling.rule=gvm | whose estimates need the policy
'megatron={"moe_router_fusion" = true}' | megatron.moe_router_fusion | set train.replay = "none"
'megatron={"moe_router_load_balancing_type" = "sinkhorn"}' | megatron.moe_router_load_balancing_type
    | set train.replay = "none"
'megatron={"moe_expert_capacity_factor" = 1.0}' | megatron.moe_expert_capacity_factor | set train.replay = "none"
'megatron={"moe_router_force_load_balancing" = true}' | megatron.moe_router_force_load_balancing
    | set train.replay = "none"
'megatron={"overlap_moe_expert_parallel_comm" = true}' | megatron.overlap_moe_expert_parallel_comm
    | set train.replay = "none"
'megatron={"cuda_graph_impl" = "local"}' | megatron.cuda_graph_impl | set train.replay = "none"
'megatron={"cuda_graph_impl" = "transformer_engine", "cuda_graph_scope" = ["attn", "moe_router"]}'
    | megatron.cuda_graph_impl | set train.replay = "none"
'megatron={"cuda_graph_impl" = "local", "cuda_graph_scope" = ["attn"]}' | megatron.cuda_graph_impl
    | set train.replay = "none"
'megatron={"cuda_graph_impl" = "local", "cuda_graph_scope" = "full_iteration"}' | megatron.cuda_graph_impl
    | set train.replay = "none"
'megatron={"enable_cuda_graph" = true}' | megatron.enable_cuda_graph | set train.replay = "none"
'megatron={"external_cuda_graph" = true}' | megatron.external_cuda_graph | set train.replay = "none"
'megatron={"moe_router_fusion" = false}' | allowed
'megatron={"moe_router_load_balancing_type" = "none"}' | allowed
'megatron={"moe_router_load_balancing_type" = ["seq_aux_loss"], "moe_aux_loss_coeff" = [0.1]}' | allowed
'megatron={"moe_expert_capacity_factor" = -1.0}' | allowed
'megatron={"cuda_graph_impl" = "none"}' | allowed
'megatron={"cuda_graph_impl" = "transformer_engine", "cuda_graph_scope" = ["attn"]}' | allowed
'megatron={"moe_permute_fusion" = true}' | allowed
'megatron={moe_router_fusion = true}' train.replay=r2 | megatron.moe_router_fusion
'megatron={moe_router_fusion = true}' train.replay=none | allowed
sampling.rule=ada_seq_pos 'train.objective_overrides={advantage = "raft"}' | allowed
"""
SEVERAL = {"reward__function": "rewards:mine", "reward__weights": {"right": 1.0, "short": 0.5}}
ALONE = ("gdpo", "opo", "reinforce_pp", "reinforce_pp_baseline", "raw", "raw_mixed", "signed", "positive_part")


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
