"""Finds by a checkpoint's files, config.json and sentence-transformers', whether it makes vectors or scores of texts.

Gateways, workers and commands read it alike. Loads no tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from wire.files import named, read_json, read_json_object

Task = Literal["embed", "score", "classify"]
Pool = Literal["last", "cls", "mean"]  # which of a text's rows become its vector
Activation = Literal["none", "sigmoid", "softmax"]

CLASSIFIER, BASE = "ForSequenceClassification", "Model"  # how names of architectures end that have no answers
CAUSAL = "LMHeadModel"  # but GPT-2's, which answers
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "modernbert", "mpnet", "distilbert")  # model_types
SHIFTED = ("roberta", "xlm-roberta", "camembert", "mpnet")  # their positions begin after pad_token_id
POOLS: Mapping[str, Pool] = {"lasttoken": "last", "cls": "cls", "cls_token": "cls", "mean": "mean"}
LEGACY = "pooling_mode_"
LEGACY_POOLS = {"lasttoken": "lasttoken", "cls_token": "cls", "mean_tokens": "mean"}
YES, NO = "yes", "no"  # tokens by which Qwen3-Reranker answers
RERANKER = "qwen3-reranker"  # in the name of a folder: such a config.json is that of a chat model
# The prompt that Qwen3-Reranker was trained with.
RERANK_PROMPT = (  # before, middle and after
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a model makes a vector or scores of a text, or of a pair of texts, instead of an answer."""

    task: Task
    pool: Pool
    is_whole: bool  # a text is computed at once, by transformers: attention goes both ways, or all rows are pooled
    max_tokens: int  # of a text
    normalizes: bool = False
    dense: tuple[str, ...] = ()  # folders of products that follow, in order
    labels: tuple[str, ...] = ()  # of a head with classes
    answers: tuple[
        str | int, ...
    ] = ()  # the score is the first token's logit, less the second's; empty: a head gives it
    activation: Activation = "none"  # of logits
    prompt: tuple[str, ...] = ()  # RERANK_PROMPT for a pair; empty: the tokenizer joins pairs
    prompts: Mapping[str, str] = field(default_factory=dict)  # name |-> what is put before a text
    default_prompt: str = ""  # the name of one

    def describe(self) -> str:
        """Says what the model makes, and which endpoint to call, to a client that asked for something else."""
        made = {
            "embed": "embeddings: send texts to /v1/embeddings",
            "score": "scores of pairs of texts: send them to /v1/rerank or /v1/score",
            "classify": "classes of texts: send them to /classify",
        }
        return made[self.task]


def read_pooling(folder: Path) -> Pooling | None:
    """None: the model answers. FileNotFoundError if there is no config.json; ValueError names what is not supported."""
    config = read_json_object(path := folder / "config.json")
    with named(path):
        kind, architectures = config.get("model_type"), config.get("architectures")
        name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        is_encoder = kind in ENCODERS or config.get("use_bidirectional_attention") is True
        is_listed = (folder / "modules.json").is_file()
        plain = Pooling("embed", "mean" if is_encoder else "last", is_encoder, 0)
        if name.endswith(CLASSIFIER):
            found = _read_classifier(config, plain)
        elif is_listed:
            found = _read_modules(folder, plain)
        elif "classifier_from_token" in config or RERANKER in f"{folder.resolve()}".lower():
            given = config.get("classifier_from_token")
            no, yes = given if isinstance(given, list) and len(given) == 2 else (NO, YES)
            found = replace(plain, task="score", answers=(yes, no), activation="sigmoid")
        elif is_encoder or (name.endswith(BASE) and not name.endswith(CAUSAL)):
            found = replace(plain, normalizes=not is_encoder)
        else:
            return None
    if not is_encoder and found.task == "score":
        found = replace(found, prompt=RERANK_PROMPT)
    return _with_lengths(folder, found, _read_length(config, is_encoder))


def _read_length(config: Mapping[str, Any], is_encoder: bool) -> int:
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or isinstance(length, bool) or not 4 <= length < 1 << 31:
        raise ValueError(f"max_position_embeddings is {length!r:.40}, expected a number of tokens, 4 or more")
    if config.get("model_type") in SHIFTED:
        return length - int(config.get("pad_token_id") or 0) - 1
    return length if is_encoder else length - 1


def _read_classifier(config: Mapping[str, Any], plain: Pooling) -> Pooling:
    named_labels = config.get("id2label")
    labels = tuple(map(str, named_labels.values())) if isinstance(named_labels, dict) else ("LABEL_0", "LABEL_1")
    known = config.get("sentence_transformers")
    given = known.get("activation_fn") if isinstance(known, dict) else None
    given = str(given or config.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
    default = "Sigmoid" if len(labels) == 1 else "Softmax"
    kinds: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
    if (given := given or default) not in kinds:
        raise ValueError(f"activation_fn {given!r:.80} is not supported; supported: {', '.join(kinds)}")
    task: Task = "score" if len(labels) == 1 else "classify"
    return replace(plain, task=task, labels=labels, activation=kinds[given])


def _read_modules(folder: Path, plain: Pooling) -> Pooling:
    modules = read_json(path := folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise ValueError(f"{path} must hold a list of objects")
    found, dense = plain, list[str]()
    for one in modules:
        kind, place = str(one.get("type", "")).rpartition(".")[2], str(one.get("path", ""))
        if Path(place).name != place:
            raise ValueError(f"{path} has path {place!r:.80}, expected the name of a folder")
        if kind == "Pooling":
            pool = _read_pool(folder / place / "config.json")
            found = replace(found, pool=pool, is_whole=found.is_whole or pool != "last")
        elif kind == "Normalize":
            found = replace(found, normalizes=True)
        elif kind == "Dense" and not found.normalizes:
            dense.append(place)
        elif kind == "LogitScore":
            tokens = read_json_object(folder / place / "config.json")
            given = [tokens[key] for key in ("true_token_id", "false_token_id") if tokens.get(key) is not None]
            found = replace(found, task="score", answers=tuple(given), activation="sigmoid")
        elif kind != "Transformer":
            known = "Transformer, Pooling, Dense, Normalize last, LogitScore"
            raise ValueError(f"{path} has {kind[:80] or 'a module without a type'}; supported: {known}")
    return replace(found, dense=tuple(dense))


def _read_pool(path: Path) -> Pool:
    config = read_json_object(path)
    modes = config.get("pooling_mode") or [
        LEGACY_POOLS.get(key.removeprefix(LEGACY), key) for key in config if key.startswith(LEGACY) and config[key]
    ]
    (mode, *others) = modes if isinstance(modes, list) and modes else [modes or "mean"]
    if others or mode not in POOLS or config.get("include_prompt") is False:
        raise ValueError(f"{path}: pooling {modes!r:.200} is not supported; supported: one of {', '.join(POOLS)}")
    return POOLS[mode]


def _with_lengths(folder: Path, found: Pooling, most: int) -> Pooling:
    """Adds the longest text, of at most `most` tokens, and the prompts, from the files of sentence-transformers."""
    files = [folder / f"{name}.json" for name in ("sentence_bert_config", "config_sentence_transformers")]
    lengths, texts = (read_json_object(path) if path.is_file() else {} for path in files)
    length, prompts = lengths.get("max_seq_length"), texts.get("prompts") or {}
    with named(files[0]):
        if length is not None and (not isinstance(length, int) or length < 4):
            raise ValueError(f"max_seq_length is {length!r:.40}, expected a number of tokens, 4 or more")
    if not isinstance(prompts, dict) or not all(isinstance(one, str) for one in prompts.values()):
        raise ValueError(f"{files[1]} has prompts {prompts!r:.80}, expected texts by name")
    default = texts.get("default_prompt_name") or ""
    return replace(found, max_tokens=min(most, length or most), prompts=prompts, default_prompt=str(default))
