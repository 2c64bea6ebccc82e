"""Decoders that answer a prompt are rankers of one row of the product with the vocabulary."""

import json
import shutil

import numpy as np
import pytest
import tiny
import torch
import transformers

from as2ray.checkpoints.cross_encoder import export_cross_encoder
from as2ray.checkpoints.decoder_reranker import DECODER_PROMPTS
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.errors import CheckpointError, ConfigError
from as2ray.evaluation.measures import evaluate
from as2ray.losses.base import StepContext
from as2ray.losses.distillation import DistillationLoss
from as2ray.training.config import TrainingConfig
from as2ray.training.frozen_cascade import CascadeConfig, make_cascade
from as2ray.training.job import ModelSpec, TrainingJob
from as2ray.training.run_job import train

QUESTION = "What is kovarin?"
TEXTS = ["Badesso.", "Kovarin ne kovarin.", "Lala muri. ", "(Odd) 12?"]
SIZES = {"max_position_embeddings": 1_000, "initializer_range": 0.3}


def write_generator(folder, family, published, tied=True):
    """Writes a decoder that answers, all weights of which are perturbed."""
    tokenizer = published(family)
    torch.manual_seed(0)
    config = tiny.config_of(family, len(tokenizer), tie_word_embeddings=tied, **SIZES)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weights in network.parameters():
            weights.add_(torch.randn_like(weights) * 0.1)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return network, folder


def whole_prompts(tokenizer, known, instruction=None):
    """Token ids of each pair's whole prompt, as the published code tokenizes its segments."""
    instruction = known.instruction if instruction is None else instruction
    for text in TEXTS:
        parts = (
            segment.replace("{instruction}", instruction)
            .replace("{question}", QUESTION)
            .replace("{candidate}", text)
            for segment in known.segments
        )
        yield torch.tensor([[i for part in parts for i in tokenizer(part)["input_ids"]]])


@torch.no_grad()
def answers(network, tokenizer, known, instruction=None) -> list[float]:
    """Logit of the good answer, minus that of the bad one if it counts."""
    ids = [tokenizer.get_vocab()[answer] for answer in known.answers]
    scores = []
    for prompt in whole_prompts(tokenizer, known, instruction):
        logits = network(prompt).logits[0, -1, ids].tolist()
        scores.append(logits[0] - sum(logits[1:]))
    return scores


def scores_of(ranker) -> list[float]:
    """Logits in the order of the texts."""
    sequences = ranker.tokenizer.encode([QUESTION] * len(TEXTS), TEXTS)
    return ranker.predict_logits(ranker.pack(sequences), len(TEXTS))[:, 1].tolist()


@pytest.mark.parametrize("family", DECODER_PROMPTS)
@pytest.mark.parametrize("tied", [True, False])
def test_generating_decoder_scores_by_its_answers_and_so_does_what_is_saved(
    published, tmp_path, family, tied
):
    network, path = write_generator(tmp_path / "own", family, published, tied)
    known, tokenizer = DECODER_PROMPTS[family], published(family)
    expected = answers(network, tokenizer, known)
    ranker = load(path, dtype="fp32", device="cpu")
    assert scores_of(ranker) == pytest.approx(expected, abs=2e-5)
    assert ranker.activation == known.activation
    saved = save(ranker, tmp_path / "saved")
    assert scores_of(load(saved, dtype="fp32", device="cpu")) == scores_of(ranker)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(saved).eval()
    with torch.no_grad():
        transformers_logits = [theirs(ids).logits.item() for ids in whole_prompts(tokenizer, known)]
    assert transformers_logits == pytest.approx(expected, abs=2e-5)
    assert np.ptp(expected) > 0.1


def test_instruction_of_the_user_stands_in_the_prompt(published, tmp_path):
    for family, text in (("qwen3", "Find it."), ("qwen2", "instruction: Find it.\n")):
        network, path = write_generator(tmp_path / family, family, published)
        ranker = load(path, dtype="fp32", device="cpu", instruction="Find it.")
        expected = answers(network, published(family), DECODER_PROMPTS[family], text)
        assert scores_of(ranker) == pytest.approx(expected, abs=2e-5)
        again = load(save(ranker, tmp_path / f"{family}-saved"), dtype="fp32", device="cpu")
        assert scores_of(again) == scores_of(ranker)
    _, path = write_generator(tmp_path / "gemma", "gemma", published)
    with pytest.raises(ConfigError, match=r"instruction='Find it\.'.*no field {instruction}"):
        load(path, instruction="Find it.")


def test_classifier_of_a_decoder_reads_the_published_prompt(checkpoint, published):
    path = checkpoint("qwen3", 1, **SIZES)
    ranker = load(path, dtype="fp32", device="cpu")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    prompts = whole_prompts(published("qwen3"), DECODER_PROMPTS["qwen3"])
    with torch.no_grad():
        expected = [theirs(ids).logits.item() for ids in prompts]
    assert scores_of(ranker) == pytest.approx(expected, abs=2e-5)
    assert ranker.activation == "sigmoid"


@pytest.mark.parametrize("labels", [1, 2])
def test_exported_decoder_is_a_classifier_with_one_label(checkpoint, published, labels, tmp_path):
    ranker = load(checkpoint("qwen3", labels, **SIZES), dtype="fp32", device="cpu")
    export_cross_encoder(ranker, tmp_path / "out")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert theirs.config.num_labels == 1
    expected = {one.index: one.score for one in ranker.rank(QUESTION, TEXTS)}
    prompts = whole_prompts(published("qwen3"), DECODER_PROMPTS["qwen3"])
    with torch.no_grad():
        transformers_scores = [theirs.eval()(ids).logits.sigmoid().item() for ids in prompts]
    assert transformers_scores == pytest.approx([expected[i] for i in range(len(TEXTS))], abs=1e-5)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'query' %}<|im_start|>user\n<Query>: {{ m.content }}\n"
    "{% elif m.role == 'document' %}<Document>: {{ m.content }}<|im_end|>\n{% else %}"
    "<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "<|im_start|>assistant\n"
)


def test_modules_of_sentence_transformers_score_as_there(published, tmp_path):
    """As Qwen3-Reranker may be published: a chat template with roles, and `LogitScore`."""
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    _, path = write_generator(tmp_path / "own", "qwen3", published)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    modules = [Transformer(str(path), transformer_task="text-generation"), LogitScore(20, 31)]
    prompts = {"web": "Find it, please."}
    theirs = library.CrossEncoder(
        modules=modules, prompts=prompts, default_prompt_name="web", device="cpu"
    )
    theirs.save_pretrained(str(tmp_path / "theirs"))
    expected = theirs.predict([(QUESTION, text) for text in TEXTS])
    ranker = load(tmp_path / "theirs", dtype="fp32", device="cpu")
    ranked = {one.index: one.score for one in ranker.rank(QUESTION, TEXTS)}
    assert [ranked[i] for i in range(len(TEXTS))] == pytest.approx(expected, abs=1e-5)
    assert ranker.tokenizer.instruction == "Find it, please."
    (tmp_path / "theirs" / "1_LogitScore" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"modules\.json names 1_LogitScore/config\.json"):
        load(tmp_path / "theirs")


def test_training_starts_from_the_head_of_a_generating_decoder(published, tmp_path):
    _, path = write_generator(tmp_path / "own", "qwen3", published)
    ranker = init_ranker(path, max_length=400, exit_layers=[1, 3])
    assert [head.pooling for head in ranker.network.heads] == ["last", "last"]
    pointwise = init_ranker(path, max_length=400)
    assert pointwise.network.config.num_labels == 1
    pointwise.eval().dtype = "fp32"
    assert scores_of(pointwise) == pytest.approx(scores_of(load(path, dtype="fp32")), abs=1e-5)


SHORT = {"prompt": ["<|im_start|>Q {question}\nD {candidate}<|im_end|>"], "format_version": 2}
"""An entry `as2ray`, with which a pair is as short as an encoder's."""


@pytest.fixture(params=["qwen3", "qwen2"])
def short(checkpoint, tmp_path, request):
    path = shutil.copytree(checkpoint(request.param, 2), tmp_path / "short")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "as2ray": SHORT}))
    return path


@pytest.mark.parametrize("short", ["qwen3"], indirect=True)
def test_decoder_learns_to_rank(short, corpus, tmp_path):
    config = TrainingConfig(epochs=2, global_batch_size=8, learning_rate=3e-3)
    job = TrainingJob(ModelSpec(str(short), 32), (str(corpus),), {"dev": str(corpus)}, config)
    ranker = load(train(job, tmp_path / "run"))
    assert ranker.tokenizer.prompt == tuple(SHORT["prompt"])
    unseen = tiny.candidates(40, seed=1)
    assert evaluate(unseen, ranker.predict_table(unseen).scores, ["AP"]).measures["AP"] > 0.8


@pytest.mark.parametrize("side", ["teacher", "student"])
def test_decoder_teaches_an_encoder_and_is_taught(short, checkpoint, side):
    paths = (
        (short, checkpoint("bert", None)) if side == "teacher" else (checkpoint("bert", 1), short)
    )
    teacher = load(paths[0], dtype="fp32", device="cpu")
    student = init_ranker(paths[1], max_length=60).eval()
    pairs = [QUESTION] * len(TEXTS), TEXTS
    sequences = teacher.tokenizer.encode(*pairs)
    logits = teacher.predict_logits(teacher.pack(sequences), len(TEXTS))
    rows = np.arange(len(TEXTS))
    batch = student.tokenizer.encode(*pairs).pack(rows, {"row": rows})
    teacher_logits = torch.from_numpy(logits[batch.sequence_data["row"]])
    targets = {"label": torch.zeros(len(TEXTS), dtype=torch.long), "teacher_logits": teacher_logits}
    optimizer, losses = torch.optim.AdamW(student.parameters(), 3e-3), []
    for step in range(6):
        losses.append(
            DistillationLoss(alpha=0.0).compute(student(batch), targets, StepContext(step))
        )
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]


def test_cascade_of_a_decoder_is_saved_with_its_prompt(short, tmp_path):
    ranker = load(short, dtype="fp32", device="cpu")
    table = tiny.with_distinct_questions(tiny.candidates(20))
    config = CascadeConfig(exit_layers=(1, 3), drop_ratios=(0.5,), epochs=1)
    make_cascade(ranker, table, tmp_path / "cascade", config=config)
    cascade = load(tmp_path / "cascade", dtype="fp32", device="cpu")
    whole = {one.index: one.score for one in ranker.rank(QUESTION, TEXTS)}
    ranking = cascade.rank(QUESTION, TEXTS)
    assert {one.exit_layer for one in ranking} == {1, 3}
    for one in cascade.rank(QUESTION, TEXTS, drop_ratios=0.0):
        assert one.score == pytest.approx(whole[one.index], abs=1e-5)


def test_decoder_whose_answers_are_unknown_is_refused(published, tmp_path):
    _, path = write_generator(tmp_path / "llama", "llama", published)
    with pytest.raises(CheckpointError, match=r"architectures=\['LlamaForCausalLM'\] answers"):
        load(path)
    _, path = write_generator(tmp_path / "qwen3", "qwen3", published)
    config = json.loads((path / "tokenizer.json").read_text())
    other = shutil.copytree(path, tmp_path / "other")
    config["model"]["merges"] = [m for m in config["model"]["merges"] if m != ["ye", "s"]]
    config["model"]["vocab"]["sey"] = config["model"]["vocab"].pop("yes")
    (other / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has no token yes"):
        load(other)


def test_lengths_leave_room_for_the_prompt_or_are_refused(published, tmp_path):
    _, path = write_generator(tmp_path / "own", "qwen3", published)
    ranker = load(path)
    assert ranker.tokenizer.max_length == 128 + ranker.tokenizer.num_special_tokens
    with pytest.raises(ConfigError, match=r"max_length=100 has no place.*the prompt alone takes"):
        load(path, max_length=100)
