"""Evaluation by perplexity: the tokens that count, their loss by a slow loop, intervals, tables."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import tokenizer as make_tokenizer
from run_evaluating import result_of
from transformers import AutoModelForCausalLM

from ram_trl.distributed import SINGLE, World
from ram_trl.errors import ConfigError
from ram_trl.evaluating.evaluate import evaluate_models
from ram_trl.evaluating.perplexity import PerplexityEvaluation
from ram_trl.evaluating.report import format_evaluation
from ram_trl.evaluating.statistics import difference, mean_of
from ram_trl.evaluating.tasks import PerplexityTask, RewardTask


# of many lengths; one without a token that is predicted, and one without any
TEXTS = [{"text": "ab3"[i % 3] * (1 + i * 5 % 13) + f"{i}=" + "xyz"[: i % 4], "other": i} for i in range(22)]
TEXTS += [{"text": "a", "other": 22}, {"text": "", "other": 23}]
ANSWERS = [{"prompt": f"{row['text'][:4]}:", "completion": f"{row['text'][4:]}+{i}"} for i, row in enumerate(TEXTS)]
CHATS = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    }
    for row in ANSWERS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    mixed = [{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}]
    for name, rows in (
        ("texts", TEXTS),
        ("answers", ANSWERS),
        ("chats", CHATS),
        ("mixed", mixed),
        ("none", [{"a": 1}]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def model(zoo):
    return AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_tied"), dtype=torch.float32)


def make_task(folder, dataset, **options):
    return PerplexityTask(**{"name": "stories", "perplexity": str(folder / f"{dataset}.jsonl"), **options})


def evaluate(task, model, batch_size=4):
    return PerplexityEvaluation(task).run(model, make_tokenizer(), batch_size, SINGLE, None)


def slow_losses(dataset, model, max_length=2048):
    """For every example the loss of each token that counts, by a forward pass for each of them."""
    tokenizer, losses = make_tokenizer(), []
    rows = {"texts": TEXTS, "answers": ANSWERS, "chats": CHATS}[dataset]
    for row in rows:
        if dataset == "texts":
            before, whole = "", row["text"]
        elif dataset == "answers":
            before, whole = row["prompt"], row["prompt"] + row["completion"]
        else:
            # the template of tests/models.py, by hand
            before = f"u:{row['prompt'][0]['content']}="
            whole = f"{before}a:{row['completion'][0]['content']}="
        tokens = tokenizer(whole)["input_ids"][:max_length]
        start = max(1, len(tokenizer(before)["input_ids"]))
        of_row = []
        for position in range(start, len(tokens)):
            with torch.no_grad():
                logits = model(torch.tensor([tokens[:position]])).logits[0, -1].double()
            of_row.append(-logits.log_softmax(-1)[tokens[position]].item())
        losses.append(of_row)
    return losses


@pytest.mark.parametrize("dataset", ["texts", "answers", "chats"])
def test_the_loss_is_that_of_a_slow_loop(folder, model, dataset):
    losses = slow_losses(dataset, model)
    metrics, records = evaluate(make_task(folder, dataset), model)
    for record, expected in zip(records, losses, strict=True):
        assert record["tokens"] == len(expected) and not record["cut"]
        if expected:
            assert record["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
        else:
            assert record["loss"] is None
    assert sum(not expected for expected in losses) == (2 if dataset == "texts" else 0)
    # weighted by tokens: long examples count for more
    mean = sum(map(sum, losses)) / sum(map(len, losses))
    assert list(metrics) == ["perplexity", "loss"]
    assert mean_of(metrics["loss"]).value == pytest.approx(mean, rel=1e-5)
    assert mean_of(metrics["perplexity"]).value == pytest.approx(math.exp(mean), rel=1e-5)
    assert not metrics["perplexity"].higher_is_better and not metrics["loss"].higher_is_better


def test_the_interval_is_that_of_a_ratio_of_sums(folder, model, zoo):
    losses = [row for row in slow_losses("texts", model) if row]
    sums, counts = np.array([sum(row) for row in losses]), np.array([len(row) for row in losses])
    n, mean = len(losses), sums.sum() / counts.sum()
    metrics, _ = evaluate(make_task(folder, "texts"), model)
    # textbook: variance of a ratio estimator; 2.080 is Student's for 21 degrees of freedom
    stderr = math.sqrt(((sums - mean * counts) ** 2).sum() / (n * (n - 1))) / counts.mean()
    loss, perplexity = mean_of(metrics["loss"]), mean_of(metrics["perplexity"])
    assert loss.n == n and loss.high - loss.value == pytest.approx(2.0796 * stderr, rel=1e-3)
    assert perplexity.high - perplexity.value == pytest.approx(2.0796 * stderr * math.exp(mean), rel=1e-3)
    # of a difference: the jackknife leaves out one example after the other
    other = AutoModelForCausalLM.from_pretrained(zoo.agent(zoo.base("qwen2_tied"), 1, scale=0.2), dtype=torch.float32)
    others = np.array([sum(row) for row in slow_losses("texts", other) if row])
    for metric, scale in (("loss", lambda value: value), ("perplexity", np.exp)):
        measured = difference(evaluate(make_task(folder, "texts"), other)[0][metric], metrics[metric])
        assert measured.value == pytest.approx(
            scale(others.sum() / counts.sum()) - scale(sums.sum() / counts.sum()), rel=1e-4
        )
        left = counts.sum() - counts
        values = scale((others.sum() - others) / left) - scale((sums.sum() - sums) / left)
        jackknife = math.sqrt((n - 1) / n * ((values - values.mean()) ** 2).sum())
        assert measured.high - measured.value == pytest.approx(2.0796 * jackknife, rel=0.2)


def test_what_is_too_long_is_cut_off_and_told(folder, model, caplog):
    losses = slow_losses("answers", model, max_length=8)
    with caplog.at_level(logging.WARNING, logger="ram_trl"):
        metrics, records = evaluate(make_task(folder, "answers", max_length=8), model)
    cut = [len(row["prompt"] + row["completion"]) > 8 for row in ANSWERS]
    assert [record["cut"] for record in records] == cut and 0 < sum(cut) < len(cut)
    assert f"task stories: {sum(cut)} of 24 examples are longer" in caplog.text
    assert mean_of(metrics["loss"]).value == pytest.approx(sum(map(sum, losses)) / sum(map(len, losses)), rel=1e-5)
    # longer than the model can read
    short = AutoModelForCausalLM.from_pretrained(model.name_or_path, dtype=torch.float32)
    short.config.max_position_embeddings = 8
    assert evaluate(make_task(folder, "answers"), short) == (metrics, records)


def test_batches_and_processes_do_not_matter(folder, model):
    task = make_task(folder, "answers", limit=20)
    evaluation = PerplexityEvaluation(task)
    texts = evaluation._tokenize(make_tokenizer(), None)
    together = evaluation._sums(texts, model, 3, SINGLE, None)
    apart = [evaluation._sums(texts, model, 3, World(rank, 2), None) for rank in range(2)]
    assert {**apart[0], **apart[1]} == together and len(apart[0]) + len(apart[1]) == 20
    assert together == pytest.approx(evaluation._sums(texts, model, 64, SINGLE, None), rel=1e-5)


def test_a_broken_model_has_no_perplexity(folder, zoo):
    model = AutoModelForCausalLM.from_pretrained(zoo.base("qwen2_tied"), dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    metrics, records = evaluate(make_task(folder, "texts"), model)
    assert mean_of(metrics["perplexity"]).value is None and records[0]["loss"] is None
    # and one that is sure of the wrong tokens
    with torch.no_grad():
        model.model.norm.weight.fill_(1e7)
    metrics, records = evaluate(make_task(folder, "texts"), model)
    assert mean_of(metrics["perplexity"]).value is None and records[0]["loss"] > 1e3


def test_texts_are_cut_into_tokens_once(folder, model, monkeypatch):
    evaluation, tokenizer, calls = PerplexityEvaluation(make_task(folder, "answers")), make_tokenizer(), []
    call = type(tokenizer).__call__
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *a, **o: calls.append(a) or call(*a, **o))
    first = evaluation.run(model, tokenizer, 4, SINGLE, None)
    assert len(calls) == 2 * len(ANSWERS)
    assert evaluation.run(model, tokenizer, 4, SINGLE, None) == first and len(calls) == 2 * len(ANSWERS)


def test_a_chat_template_that_fails_is_told_with_the_task(folder, model):
    strict = "{{ raise_exception('no system\nrole') }}"
    for template, options, words in (
        (strict, {}, "cannot render .*TemplateError: no system role"),
        ("{{ messages | nothing }}", {}, "TemplateAssertionError"),
        ("{{ 1 + messages }}", {}, "TypeError"),
        # an argument of apply_chat_template, and not of the template
        ("x", {"tokenize": False}, "with chat_template_kwargs={'tokenize': False}: TypeError"),
        (None, {}, "has no chat template"),
    ):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        task = make_task(folder, "chats", chat_template_kwargs=options)
        with pytest.raises(ConfigError, match=f"task stories: .*{words}") as caught:
            PerplexityEvaluation(task).run(model, tokenizer, 4, SINGLE, None)
        assert "\n" not in str(caught.value)


def test_a_row_of_the_table(folder, zoo, tmp_path):
    base = zoo.base("qwen2_tied")
    registry = zoo.registry(
        base, {name: zoo.agent(base, seed, scale=0.2) for seed, name in enumerate(["code", "math"])}
    )
    reward = {"dataset": str(folder / "answers.jsonl"), "reward_funcs": ["run_evaluating:letters"], "limit": 2}
    tasks = [
        make_task(folder, "texts", agent="math"),
        RewardTask(name="letters", max_new_tokens=4, **reward),
    ]
    content = evaluate_models(registry, tasks, str(tmp_path), merges={"m": {}}, dtype="float32")
    assert content["tasks"]["stories"]["kind"] == "perplexity" and not content["tasks"]["stories"]["higher_is_better"]
    path, kept = result_of(tmp_path, "math@v1", "stories")
    agent = AutoModelForCausalLM.from_pretrained(zoo.agent(base, 1, scale=0.2), dtype=torch.float32)
    losses = slow_losses("texts", agent)
    expected = math.exp(sum(map(sum, losses)) / sum(map(len, losses)))
    cell = content["rows"]["math@v1"]["tasks"]["stories"]["metrics"]["perplexity"]
    assert cell["value"] == pytest.approx(expected, rel=1e-5) and cell["n"] == 22
    # the gain is one of fewer, not of more
    values = {name: row["tasks"]["stories"]["metrics"]["perplexity"]["value"] for name, row in content["rows"].items()}
    [gain] = content["retained_gain"]
    assert gain["value"] == pytest.approx((values["m"] - values["base"]) / (values["math@v1"] - values["base"]))
    assert values["math@v1"] < values["base"] and gain["note"] is None
    assert all(row["mean"]["value"] is None for row in content["rows"].values())
    assert "Lower is better: stories; so there is no mean" in format_evaluation(content)
    lines = (tmp_path / kept["completions"]).read_text().splitlines()
    assert len(lines) == 24 and json.loads(lines[0])["text"] == TEXTS[0]["text"]
    # other texts are another measurement
    changed = replace(tasks[0], limit=3)
    assert evaluate_models(registry, [changed], str(tmp_path), agents=["math"], dtype="float32")
    assert len(list((tmp_path / "results").glob("*.json"))) == 8 + 2 and path.exists()


@pytest.mark.parametrize(
    "dataset, words",
    [
        ("none", "has neither a column 'text' nor 'prompt' and 'completion', only a"),
        ("mixed", "neither text nor messages throughout"),
        ("absent", "cannot be loaded"),
    ],
)
def test_what_a_dataset_must_not_be(folder, model, dataset, words):
    with pytest.raises(ConfigError, match=f"task stories: .*{words}"):
        evaluate(make_task(folder, dataset), model)
