"""What training with replayed routes needs of an inference engine, asked of a running server.

``check_engine(url)`` sends requests, compares the answers with each other, and returns a verdict for each point of
``engine.toml``; docs/verify_engine.md explains the points. Take an idle server. The server's weights stay as they are
unless ``update`` is set.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import contains
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from safetensors import safe_open

from megarl.errors import ConfigError, MegarlError, RequestError, TraceError, printable, reworded
from megarl.files.foreign_json import parse_json
from megarl.files.hf_config import MoeShape
from megarl.files.texts import read_table
from megarl.routes.disagreement import shared_experts
from megarl.routes.trace import RoutingTrace
from megarl.verify.engine_client import Answer, EngineClient
from megarl.verify.trace_files import compare_traces

Verdict = Literal["ok", "fails", "not asked", "not answered"]
CONTRACT = read_table(__file__)
MIN_OVERLAP = 0.75
"""Rows that share less of their experts (mean over layers) are rows of different tokens."""
PROMPT, RESPONSE, BATCH, MAX_REQUESTS = 48, 16, 16, 256


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """One point of the contract."""

    name: str
    verdict: Verdict
    found: str
    expected: str
    remedy: str


class _SkipError(Exception):
    """The reason, and the verdict."""


def check_engine(url: str, api_key: str | None = None, timeout_s: float = 600.0, **options: Any) -> list[EngineCheck]:
    """Ask the server at ``url`` for each point of the contract, and return the verdicts.

    timeout_s: of one request. options:

    - model_path: folder with config.json, and with the checkpoint for the expert biases (default: the folder that the
      server names, if it is on this machine);
    - max_flip (0.05): share of (row, layer) pairs that two computations of the same tokens may route differently;
    - max_logprob_error (0.05 nats): mean absolute difference of their log-probabilities;
    - top_p (0, off): a value below 1, for which the kept sets are checked;
    - pressure (False): fill the server's memory until it retracts requests;
    - update (False): load the folder's weights into the server under a new version, and then name them as before.

    RolloutError without an answer, ConfigError for a URL of another service, or a model that is not here.
    """
    probe, checks = _Probe(EngineClient(url, api_key, timeout_s), **options), list[EngineCheck]()
    for name, point in CONTRACT["points"].items():
        verdict: Verdict = "ok"
        try:
            if probe.client.name == "vLLM" and "vllm" in point:
                raise _SkipError(f"vLLM: {point['vllm']}", "not answered")
            if "needs" in point and not getattr(probe, point["needs"]):
                raise _SkipError(f"needs {point['needs']}", "not asked")
            if checks and checks[0].verdict == "fails":
                raise _SkipError("see routes", "not answered")
            text = getattr(probe, f"ask_{name}")()
        except _SkipError as skip:
            text, verdict = skip.args
        except MegarlError as error:
            text, verdict = str(error), "fails"
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            text, verdict = f"an answer of another form ({error!r})", "fails"
        checks.append(EngineCheck(name.replace("_", " "), verdict, text, point["expected"], point["remedy"]))
    return checks


def show_engine(url: str, tell: Callable[[str], object] = print, **options: Any) -> int:
    """Print the verdicts of ``check_engine``; return 1 if a check fails, else 0. Errors as ``check_engine``."""
    checks = check_engine(url, **options)
    for check in checks:
        tell(printable(f"{check.verdict:12}  {check.name}: {check.found}"))
        if check.verdict == "fails":
            tell(f"{'':14}expected: {check.expected}\n{'':14}remedy: {check.remedy}")
    return int(any(check.verdict == "fails" for check in checks))


@dataclass
class _Probe:
    """The server, the model, and a first answer. Each ``ask_`` returns what it found, or raises TraceError."""

    client: EngineClient
    model_path: Path | str | None = None
    max_flip: float = 0.05
    max_logprob_error: float = 0.05
    top_p: float = 0.0
    pressure: bool = False
    update: bool = False

    def __post_init__(self) -> None:
        self.info, self.salt = self.client.info, uuid4().hex
        self.folder = Path(self.model_path or self.info.get("model_path") or "")
        if not (path := self.folder / "config.json").is_file():
            raise ConfigError(f"{self.folder} has no config.json: give the folder of the server's model as model_path")
        config = parse_json(path.read_bytes(), str(path), 1 << 24)
        self.shape, config = MoeShape.of(config), (config.get("text_config") or {}) | config
        self.vocabulary = config["vocab_size"]
        self.room = self.info.get("max_req_input_len") or config.get("max_position_embeddings", 4096)
        self.random, self.versions = np.random.default_rng(0), set[str | None]()

    @cached_property
    def first(self) -> Answer:
        return self.ask([self.prompt()], RESPONSE, self.salt)[0]

    def prompt(self, size: int = PROMPT) -> list[int]:
        """Draw tokens, from the part of the vocabulary that has no special tokens."""
        return self.random.integers(self.vocabulary // 8, self.vocabulary // 2, size).tolist()

    def ask(self, prompts: list[list[int]], num_tokens: int = 1, salt: str = "", **options: Any) -> list[Answer]:
        """Ask for answers that are computed anew, unless a known salt gives them the prefix cache of other answers."""
        answers = self.client.ask(prompts, num_tokens, salt or uuid4().hex, **options)
        self.versions.update(*(answer.versions for answer in answers))
        return answers

    def compare(self, actual: Answer, expected: Answer, exact: int = 0) -> str:
        """TraceError unless rows are the expected ones up to the first different token, the first ``exact`` in all."""
        first, last = max(actual.start, expected.start), min(len(actual.tokens), len(expected.tokens)) - 1
        changed = np.not_equal(actual.tokens[:last], expected.tokens[:last])
        last = int(np.append(changed, True).argmax())
        used, wanted = (_cut(answer.trace(self.shape), first, last) for answer in (actual, expected))
        overlap = shared_experts(used.experts, wanted.experts) / self.shape.topk
        wrong = ~(used.row_mask & wanted.row_mask) | (overlap.mean(1) < MIN_OVERLAP)
        wrong |= (np.arange(first, last) < exact) & (overlap < 1).any(1)
        text = f"{np.mean(overlap < 1):.2%} of {overlap.size} (row, layer) pairs differ"
        if wrong.any() or np.mean(overlap < 1) > self.max_flip:
            rows = (first + np.flatnonzero(wrong)).tolist()
            causes = compare_traces([wanted], [used], self.shape.moe_layers).causes
            why = "; ".join(cause.text.partition(": ")[2] for cause in causes)
            raise TraceError(f"{text}; {len(rows)} rows are missing or of other tokens, {rows[:3]}...; {why}")
        return text

    def compare_logprobs(self, answer: Answer, again: Answer) -> str:
        """Compare an answer's log-probabilities, up to the first different token, with those of a second computation,
        which read the response as part of its prompt, or decoded it too."""
        ours, size = answer.logprobs(), len(answer.prompt)
        theirs = np.append(again.logprobs("input")[size:], again.logprobs())[: len(ours)]
        if not len(ours) == len(theirs) == len(answer.output):
            raise TraceError(f"{len(ours)} and {len(theirs)} log-probabilities of {len(answer.output)} tokens")
        same = np.append(np.not_equal(answer.tokens, again.tokens[: len(answer.tokens)])[size:], True).argmax()
        errors = np.abs(ours - theirs)[: same or 1]
        text = f"log-probabilities differ by {errors.mean():.2g} nats on average, {errors.max():.2g} at most"
        if not errors.mean() <= self.max_logprob_error:
            raise TraceError(text)
        return text

    @cached_property
    def again(self) -> Answer:
        """The tokens of the first answer as a prompt."""
        return self.ask([self.first.tokens], scores_prompt=True)[0]

    def ask_routes(self) -> str:
        trace = self.first.trace(self.shape)
        if trace.num_missing > 1:  # the last token never has a row
            raise TraceError(f"{trace.num_missing - 1} of {len(trace.experts) - 1} rows are -1")
        used = len(np.unique(trace.experts))
        size = f"{list(trace.experts.shape)} with the last token"
        return f"{size}; {used} of {trace.num_experts} experts are used; {self.shape}"

    def ask_slot_order(self) -> str:
        """Experts of small weight are the first to leave in another context: see in which slots they were."""
        prompt, orders = np.array(self.prompt()), [self.random.permutation(PROMPT) for _ in range(4)]
        answers = self.ask([prompt[order].tolist() for order in orders])
        rows = [a.trace(self.shape).experts[np.argsort(order)] for a, order in zip(answers, orders, strict=True)]
        stays = np.array([(one[..., None] == two[..., None, :]).any(-1) for one, two in pairwise(rows)])
        slots = np.broadcast_to(np.arange(self.shape.topk), stays.shape)
        early, late = slots[stays].mean(), np.mean(slots[~stays]) if not stays.all() else 0.0
        kind = "descending weight, by all signs" if late - early > self.shape.topk / 10 else "no order of weights"
        kind = kind if (np.diff(np.stack(rows).astype(int)) <= 0).any() else "numbers of the experts"
        return f"{kind}: experts that stay in another context have slot {early:.1f} on average, others {late:.1f}"

    def ask_token_of_a_row(self) -> str:
        prompt, last = self.prompt(), PROMPT - 1
        tokens = {*self.prompt(2 * BATCH)} - {prompt[last]}
        traces = [a.trace(self.shape) for a in self.ask([prompt, *([*prompt[:last], token] for token in tokens)])]
        overlaps = [shared_experts(trace.experts, traces[0].experts)[:PROMPT] for trace in traces[1:]]
        shares = np.mean(overlaps, (0, 2)) / self.shape.topk
        changed = np.flatnonzero(shares < MIN_OVERLAP).tolist()
        if changed[:1] != [last]:
            raise TraceError(f"prompts that differ in token {last} have different routes in rows {changed[:5]}")
        return f"of a differing token prompts share {shares[last]:.0%} of the experts, before {min(shares[:last]):.0%}"

    def ask_determinism(self) -> str:
        again = self.ask([self.first.prompt], RESPONSE)[0]
        same = int(np.append(np.not_equal(again.output, self.first.output), True).argmax())
        rows, errors = self.compare(again, self.first), self.compare_logprobs(again, self.first)
        return f"{same} of {RESPONSE} tokens are the same; {rows}; {errors}"

    def ask_batch(self) -> str:
        ranks = self.info.get("dp_size") or 1
        prompts = [self.prompt(int(size)) for size in self.random.integers(2, PROMPT, BATCH * ranks)]
        rows = self.compare(self.ask([self.first.tokens, *prompts])[0], self.first)
        return f"in a batch of {len(prompts) + 1} on {ranks} data-parallel ranks: {rows}"

    def ask_decode(self) -> str:
        draft = self.info.get("speculative_algorithm") or "no"
        return f"with {draft} draft model: {self.compare(self.first, self.again)}"

    def ask_logprobs(self) -> str:
        logprobs, expected = self.first.logprobs(), len(self.first.output)
        if len(logprobs) != expected or not (logprobs <= 1e-6).all() or (logprobs.any() and _is_rounded(logprobs)):
            kind = "numbers of bf16" if len(logprobs) and _is_rounded(logprobs) else f"up to {logprobs.max(initial=-1)}"
            raise TraceError(f"{len(logprobs)} log-probabilities of {expected} tokens, {kind}")
        return self.compare_logprobs(self.first, self.again)

    def ask_prefix_cache(self) -> str:
        filled, again = (self.ask([self.first.prompt + more], salt=self.salt)[0] for more in ([], self.prompt(4)))
        cached = again.meta.get("cached_tokens")
        rows = self.compare(again, filled, cached or 0)
        if not cached:
            raise _SkipError(f"{rows}; {cached} cached tokens", "not answered")
        return f"{cached} of {PROMPT} rows were cached; {rows}"

    def ask_chunks(self) -> str:
        """Compute a prompt twice, the second time with half a chunk cached: its chunks end elsewhere."""
        chunk, salt = self.info.get("chunked_prefill_size") or 0, uuid4().hex
        prompt = self.prompt(max(min(2 * chunk + chunk // 4, self.room - 8), 0))
        if not 8 <= chunk < len(prompt):
            raise _SkipError(f"chunks have {chunk} tokens, prompts at most {self.room}", "not asked")
        whole, _, other = (self.ask([prompt[:n]], salt=s)[0] for n, s in ((None, ""), (chunk // 2, salt), (None, salt)))
        if not other.meta.get("cached_tokens"):
            raise _SkipError("without a prefix cache a prompt is divided in one way", "not answered")
        return f"{len(prompt)} tokens in chunks of {chunk}: {self.compare(whole, other)}"

    def ask_later_turn(self) -> str:
        prompt, start = [*self.first.tokens, *self.prompt(4)], len(self.first.tokens) - 1
        part, whole = self.ask([prompt], salt=self.salt, start=start)[0], self.ask([prompt])[0]
        rows = self.compare(part, whole)
        if len(part.meta["routed_experts"]) >= len(whole.meta["routed_experts"]):
            raise TraceError(f"the answer has all rows, although those from {start} on were asked for")
        return f"from row {start} of {len(prompt)} on: {rows}"

    def ask_retraction(self) -> str:
        capacity = self.info["max_total_num_tokens"]
        num = min(self.info.get("max_running_requests") or MAX_REQUESTS, MAX_REQUESTS, capacity // 32)
        size = min(2 * capacity // num, self.room - BATCH - 8)

        def ask(prompt: list[int]) -> Answer | None:
            # One request each: all routes at once may be gigabytes. For ignore_eos SGLang reserves the whole length.
            answer = self.ask([prompt], size, ignore_eos=False)[0]
            return answer if answer.meta.get("num_retractions") else None

        with ThreadPoolExecutor(num) as pool:
            retracted = [answer for answer in pool.map(ask, [self.prompt(BATCH) for _ in range(num)]) if answer]
        if not retracted:
            raise _SkipError(f"none of {num} requests of {size} tokens was retracted", "not answered")
        pairs = [(answer, self.ask([answer.tokens], scores_prompt=True)[0]) for answer in retracted[:4]]
        texts = [f"{self.compare(*pair)}; {self.compare_logprobs(*pair)}" for pair in pairs]
        return f"{len(retracted)} of {num} requests were retracted; the last: {texts[-1]}"

    def ask_kept_sets(self) -> str:
        answer = self.ask([self.prompt()], RESPONSE, top_p=self.top_p)[0]
        kept, inside = (answer.meta.get(f"output_token_sampling_{name}") or [] for name in ("mask", "logprobs"))
        if not len(kept) == len(inside) == RESPONSE or not all(map(contains, kept, answer.output)):
            raise TraceError(f"{len(kept)} kept sets, {len(inside)} log-probabilities within them, {RESPONSE} tokens")
        mass = np.exp(answer.logprobs() - np.array(inside))
        text = f"{min(map(len, kept))} to {max(map(len, kept))} ids of probability {min(mass):.3f} to {max(mass):.3f}"
        if not (min(mass) > self.top_p - 0.01 and max(mass) < 1.01):
            raise TraceError(text)
        return text

    def ask_weight_version(self) -> str:
        """With ``update``: under a new version, and then again under the old one."""
        named, new = self.client.call("/model_info").get("weight_version"), self.salt
        if self.versions != {named} or named is None:
            raise TraceError(f"answers are of weights {self.versions}, the server's weights are {named!r}")
        if not self.update:
            return f"{named!r} in each answer; an update needs update"
        self.client.call("/update_weights_from_disk", {"model_path": str(self.folder), "weight_version": new})
        try:
            answer = self.ask([self.first.prompt], RESPONSE, self.salt)[0]
        finally:
            self.client.call("/update_weight_version", {"new_version": named})
        text = f"after an update to {new!r} an answer is of {answer.versions}"
        if answer.versions != {new} or answer.meta.get("cached_tokens"):
            raise TraceError(f"{text}, with {answer.meta.get('cached_tokens')} cached tokens")
        return f"{text}; {self.compare(answer, self.first)}"

    def ask_expert_biases(self) -> str:
        """SGLang's checksum on a CPU begins the sha256 of a tensor's bytes."""
        if not (biases := _read_biases(self.folder)):
            raise _SkipError("the checkpoint has no e_score_correction_bias that bf16 would round", "not asked")
        with reworded(RequestError, lambda text: _SkipError(text, "not answered")):
            sums = self.client.call("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
        kinds = set[str]()
        for name, exact in biases.items():
            bits = exact.view("<u4")
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            forms = {"exact": exact, "bf16": rounded.astype("<u2"), "rounded": (rounded << 16).astype("<u4")}
            known = {hashlib.sha256(form.tobytes()).hexdigest()[:16]: kind for kind, form in forms.items()}
            kinds.add(known.get(sums.get(name), "unknown"))
        if kinds & {"bf16", "rounded"}:
            raise TraceError("expert biases are rounded to bf16: at published sizes half of the rows get other experts")
        if kinds != {"exact"}:
            raise _SkipError("checksums are of a GPU, or of other weights than the folder's", "not answered")
        return f"{len(biases)} tensors"


def _cut(trace: RoutingTrace, first: int, last: int) -> RoutingTrace:
    return RoutingTrace.of_sets(trace.experts[first:last], trace.num_experts, trace.row_mask[first:last], trace.label)


def _is_rounded(values: np.ndarray) -> bool:
    """Whether bf16 holds all of the values."""
    return not (values.astype("<f4").view("<u4") & 0xFFFF).any()


def _read_biases(folder: Path) -> dict[str, np.ndarray]:
    """The checkpoint's expert biases in float32 that bf16 does not hold."""
    biases = dict[str, np.ndarray]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            names = [name for name in file.keys() if name.endswith("e_score_correction_bias")]  # noqa: SIM118
            biases |= {name: file.get_tensor(name) for name in names if file.get_slice(name).get_dtype() == "F32"}
    return {name: values for name, values in biases.items() if not _is_rounded(values)}
