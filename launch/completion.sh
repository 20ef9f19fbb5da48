# shellcheck shell=bash disable=SC2034,SC2206,SC2207,SC2296
# Completion of megarl for bash and zsh: commands, flags, keys of the configuration, their choices, and files.
# Written by tools/completion.py. In ~/.bashrc or, behind compinit, in ~/.zshrc:
#
#     . "$(megarl recipes path completion.sh)"

# Words that may stand in a place: "" (commands), behind a command, its flags ("train --"), behind a flag or an action.
_megarl_words() {
  case "$1" in
    "") echo "train launch launch sft launch eval sft eval gap data plan doctor report samples status trace verify convert quantize patch recipes quickstart --help --version" ;;
    "configured") echo "train launch launch sft launch eval sft eval gap plan doctor" ;;
    "train --") echo "--trust --help" ;;
    "launch --") echo "--trust --help" ;;
    "launch sft --") echo "--trust --help" ;;
    "launch eval --") echo "--trust --checkpoint --data --samples --k --template --out --help" ;;
    "sft --") echo "--trust --help" ;;
    "eval --") echo "--trust --checkpoint --data --samples --k --template --out --help" ;;
    "gap --") echo "--config --prompts --responses --tokens --max-k3 --trust --json --help" ;;
    "data --") echo "--prompt-field --answer-field --answer-after --system --template --model --trust --max-prompt-tokens --split --limit --heldout --overwrite --json --help" ;;
    "data") echo "prepare" ;;
    "plan --") echo "--trust --model --json --help" ;;
    "doctor --") echo "--trust --json --help" ;;
    "report --") echo "--out --help" ;;
    "samples --") echo "--step --json --help" ;;
    "status --") echo "--json --help" ;;
    "trace --") echo "--json --help" ;;
    "trace") echo "inspect diff" ;;
    "verify --") echo "--engine --model --api-key-env --top-p --pressure --json --update --help" ;;
    "convert --") echo "--shard-gib --json --overwrite --model --dtype --layers --drop --help" ;;
    "convert --dtype") echo "keep fp32 bf16 fp16" ;;
    "convert --layers") echo "installed local te" ;;
    "quantize --") echo "--shard-gib --json --overwrite --block --help" ;;
    "patch --") echo "--version --json --help" ;;
    "patch") echo "check apply revert status" ;;
    "recipes --") echo "--help" ;;
    "recipes") echo "list copy path" ;;
    "quickstart --") echo "--out --family --help" ;;
    "quickstart --family") echo "qwen3_moe qwen3 qwen2 llama" ;;
    "--run.deterministic") echo "true false" ;;
    "--model.trust_remote_code") echo "true false" ;;
    "--model.dtype") echo "fp32 bf16" ;;
    "--parallel.dispatcher") echo "alltoall allgather flex" ;;
    "--parallel.distributed_optimizer") echo "true false" ;;
    "--data.chat_template") echo "true false" ;;
    "--rollout.engine") echo "local sglang" ;;
    "--rollout.keep_sampling_mask") echo "true false" ;;
    "--rollout.fp8_rounding") echo "true false" ;;
    "--rollout.fp8_activations") echo "true false" ;;
    "--rollout.fp8_kv_cache") echo "true false" ;;
    "--rollout.dtype") echo "fp32 bf16" ;;
    "--rollout.one_step_off") echo "true false" ;;
    "--rollout.reread") echo "replay drop ask" ;;
    "--sampling.subsample") echo "balance pos any none" ;;
    "--sampling.keep") echo "first random" ;;
    "--sampling.refill") echo "true false" ;;
    "--sampling.advantages") echo "objective credit none" ;;
    "--estimate.pooled") echo "true false" ;;
    "--gvm.block") echo "embedding output_layer" ;;
    "--credit.statistics") echo "pool trained" ;;
    "--credit.scale") echo "none std rate root_rate none" ;;
    "--credit.ddof") echo "0 1" ;;
    "--credit.weigh") echo "sample prompt" ;;
    "--environment.format") echo "block hermes" ;;
    "--sglang.sync") echo "auto ipc distributed tensor disk" ;;
    "--sglang.deltas") echo "true false" ;;
    "--sglang.spare_weights") echo "memory disk none" ;;
    "--sglang.release_memory") echo "true false" ;;
    "--sglang.checksums") echo "true false" ;;
    "--sglang.fp8") echo "true false" ;;
    "--train.objective") echo "minirl minirl_length_norm minirl_no_is minirl_no_clip reinforce rloo grpo dapo gspo cispo raft raft_pp reinforce_rej reinforce_rej_signed ctpo kl_grpo kl_grpo_token power upper_clip ppo_upper adaptive_power dr_grpo grpo_mu dppo_tv dppo_kl dppo_topk drpo icepop kpop dis deepseek_v32 seq_mis geo_rs sapo ce_gppo topr vespo gmpo rspo minimal_mask ipo mis_po trm luspo flash_reinforce m2po cppo" ;;
    "--train.old_logprobs") echo "recomputed rollout" ;;
    "--train.replay") echo "none r2 r3" ;;
    "--train.replay_gates") echo "true false" ;;
    "--train.replay_indexer") echo "true false" ;;
    "--train.replay_reference") echo "true false" ;;
    "--train.max_k3") echo "learn off" ;;
    "--train.max_native_flip") echo "learn off" ;;
    "--optim.decay_style") echo "constant linear cosine inverse-square-root" ;;
    "--recompute.granularity") echo "selective full none" ;;
    "--recompute.method") echo "uniform block none" ;;
    "--checkpoint.at_end") echo "true false" ;;
    "--checkpoint.asynchronous") echo "true false" ;;
    "--checkpoint.resume") echo "true false" ;;
    "--launch.layout") echo "local colocated disaggregated heterogeneous" ;;
    "--log.samples_per_step") echo "all" ;;
    "--health.zero_reward_steps") echo "off" ;;
    "--health.contrast_share") echo "off" ;;
    "--health.solved_share") echo "off" ;;
    "--health.pass_rate_ratio") echo "off" ;;
    "--health.reward_error_share") echo "off" ;;
    "--health.entropy_fall_ratio") echo "off" ;;
    "--health.entropy_rise_ratio") echo "off" ;;
    "--health.k3_nats") echo "off" ;;
    "--health.k3_ratio") echo "off" ;;
    "--health.ess_share") echo "off" ;;
    "--health.clipped_share") echo "off" ;;
    "--health.capped_share") echo "off" ;;
    "--health.weight_share") echo "off" ;;
    "--health.weight_excess") echo "off" ;;
    "--health.flip_share") echo "off" ;;
    "--health.flip_ratio") echo "off" ;;
    "--health.missing_rows_share") echo "off" ;;
    "--health.stale_rows_share") echo "off" ;;
    "--health.reread_share") echo "off" ;;
    "--health.staleness_updates") echo "off" ;;
    "--health.length_ratio") echo "off" ;;
    "--health.truncated_share") echo "off" ;;
    "--health.gradient_ratio") echo "off" ;;
    "--health.zero_gradient_steps") echo "off" ;;
    "--health.idle_share") echo "off" ;;
    "--health.sink_failures") echo "off" ;;
    "--sft.decay_style") echo "constant linear cosine inverse-square-root" ;;
    "keys") echo "--run.name --run.dir --run.seed --run.steps --run.collective_timeout_s --run.deterministic --model.path --model.trust_remote_code --model.dtype --model.reference --parallel.tp --parallel.pp --parallel.vpp --parallel.ep --parallel.etp --parallel.cp --parallel.dispatcher --parallel.distributed_optimizer --data.train --data.heldout --data.prompt_field --data.answer_field --data.chat_template --data.chat_template_args --data.max_prompt_tokens --data.split --data.heldout_split --reward.function --reward.workers --reward.timeout_s --reward.max_characters --reward.threshold --reward.weights --reward_model.urls --reward_model.text --reward_model.concurrency --reward_model.timeout_s --reward_model.attempts --reward_model.api_key_env --rollout.engine --rollout.prompts_per_step --rollout.group_size --rollout.max_response_tokens --rollout.temperature --rollout.top_p --rollout.keep_sampling_mask --rollout.max_kept_ids --rollout.fp8_rounding --rollout.fp8_activations --rollout.fp8_kv_cache --rollout.dtype --rollout.one_step_off --rollout.max_staleness --rollout.window --rollout.max_batch_size --rollout.reread --sampling.rule --sampling.train_size --sampling.round_size --sampling.max_samples --sampling.tiers --sampling.positives --sampling.negatives --sampling.subsample --sampling.keep --sampling.refill --sampling.max_prompts --sampling.spare --sampling.advantages --estimate.objective --estimate.eps --estimate.min_samples --estimate.decay --estimate.prior_positives --estimate.prior_negatives --estimate.pooled --gvm.pre_samples --gvm.refresh_every --gvm.alpha --gvm.beta --gvm.block --gvm.max_samples --credit.statistics --credit.scale --credit.ddof --credit.floor --credit.rate_eps --credit.objective --credit.weigh --environment.function --environment.options --environment.tools --environment.format --environment.call_open --environment.call_close --environment.observation --environment.stop --environment.max_turns --environment.max_turn_tokens --environment.step_s --environment.episode_s --environment.concurrency --environment.python_s --environment.python_memory_mb --environment.python_output_kb --environment.python_processes --sglang.urls --sglang.servers --sglang.gpus --sglang.host --sglang.python --sglang.tp --sglang.mem_fraction --sglang.max_total_tokens --sglang.arguments --sglang.api_key_env --sglang.sync --sglang.deltas --sglang.spare_weights --sglang.release_memory --sglang.checksums --sglang.fp8 --sglang.concurrency --sglang.deadline_s --sglang.attempts --sglang.start_deadline_s --sglang.max_restarts --train.objective --train.objective_overrides --train.mini_batches --train.micro_batch_tokens --train.old_logprobs --train.replay --train.replay_min_score --train.replay_gates --train.replay_indexer --train.replay_reference --train.max_missing_rows --train.min_route_agreement --train.max_k3 --train.max_native_flip --train.max_bad_steps --optim.lr --optim.min_lr --optim.warmup_steps --optim.weight_decay --optim.decay_steps --optim.decay_style --optim.adam_beta1 --optim.adam_beta2 --optim.adam_eps --optim.clip_grad --recompute.granularity --recompute.method --recompute.num_layers --recompute.modules --eval.every --eval.samples --eval.max_prompts --eval.temperature --eval.sets --checkpoint.every --checkpoint.at_end --checkpoint.keep --checkpoint.keep_every --checkpoint.asynchronous --checkpoint.resume --launch.layout --launch.nodes --launch.ranks_per_node --launch.server_nodes --launch.gpu_memory_gib --launch.max_restarts --launch.stop_grace_s --log.sinks --log.project --log.hang_s --log.traces_every --log.samples_per_step --health.patience_steps --health.start_steps --health.zero_reward_steps --health.contrast_share --health.solved_share --health.pass_rate_ratio --health.reward_error_share --health.entropy_fall_ratio --health.entropy_rise_ratio --health.k3_nats --health.k3_ratio --health.ess_share --health.clipped_share --health.capped_share --health.weight_share --health.weight_excess --health.flip_share --health.flip_ratio --health.missing_rows_share --health.stale_rows_share --health.reread_share --health.staleness_updates --health.length_ratio --health.truncated_share --health.gradient_ratio --health.zero_gradient_steps --health.idle_share --health.sink_failures --sft.lr --sft.min_lr --sft.warmup_steps --sft.weight_decay --sft.data --sft.out --sft.steps --sft.batch_size --sft.decay_style --sft.prompt_field --sft.response_field --sft.messages_field" ;;
    "recipes copy") echo "cpu-quickstart deepseek-v3 glm-4.5-air gpt-oss-20b-8gpu moonlight-16b-a3b qwen3-235b-a22b qwen3-30b-a3b-32gpu qwen3-30b-a3b-64gpu qwen3-30b-a3b-8gpu qwen3-next-80b-a3b starter" ;;
    "recipes path") echo "cpu-quickstart deepseek-v3 glm-4.5-air gpt-oss-20b-8gpu moonlight-16b-a3b qwen3-235b-a22b qwen3-30b-a3b-32gpu qwen3-30b-a3b-64gpu qwen3-30b-a3b-8gpu qwen3-next-80b-a3b starter" ;;
  esac
}

# The candidates for the word that begins with $1, behind the words $2 and on (without megarl); none: files.
_megarl_candidates() {
  local current="$1" command="" word last=""
  shift
  for word in "$@"; do
    case "$word" in -*) ;; *) [ -n "$command" ] || command="$word" ;; esac
    last="$word"
  done
  if [ -z "$command" ]; then
    _megarl_words ""
    return
  fi
  case "$last" in --*) _megarl_words "$last" ;; esac
  case "$current" in
    -*)
      _megarl_words "$command --"
      case " $(_megarl_words configured) " in *" $command "*) _megarl_words keys ;; esac
      return ;;
  esac
  if [ "$last" = "$command" ]; then _megarl_words "$command"; else _megarl_words "$command $last"; fi
}

_megarl_bash() {
  local current="${COMP_WORDS[COMP_CWORD]}"
  local words
  words="$(_megarl_candidates "$current" "${COMP_WORDS[@]:1:COMP_CWORD-1}")"
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [ -z "$words" ]; then COMPREPLY=($(compgen -f -- "$current")); fi
}

_megarl_zsh() {
  local -a found
  found=(${=$(_megarl_candidates "$PREFIX" "${(@)words[2,CURRENT-1]}")})
  if (( $#found )); then compadd -a found; else _files; fi
}

if [ -n "${ZSH_VERSION:-}" ]; then
  compdef _megarl_zsh megarl
else
  complete -o filenames -F _megarl_bash megarl
fi
