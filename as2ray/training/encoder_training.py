"""Training of a sentence encoder on questions and their answers, with in-batch negatives.

Each question's answer is the positive, and the answers of the other pairs of the batch are its
negatives (multiple negatives ranking loss; Henderson et al. 2017, section 4.4). The batch may be
shared by several workers: each encodes a part, and sees the answers of all.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from as2ray.checkpoints.sentence_encoder import load_sentence_encoder, save_sentence_encoder
from as2ray.errors import ConfigError, DivergedError
from as2ray.models.precision import resolve_dtype
from as2ray.models.sentence_encoder import SentenceEncoder
from as2ray.tables.parquet import ParquetTable
from as2ray.text.packing import pack_sequences
from as2ray.training import parallel
from as2ray.training.config import TrainingConfig
from as2ray.training.job import EncoderJob
from as2ray.training.optimization import compute_learning_rate, create_optimizer

log = logging.getLogger(__name__)


def run_encoder_job(job: EncoderJob, folder: Path) -> int:
    """Trains in this process, which may be one of several in a process group; the first one saves.

    Args:
        job: What is trained.
        folder: Folder of the encoder; one that exists is replaced.

    Returns:
        The number of pairs. A pair alone has no negative, so it changes nothing.
    """
    encoder = load_sentence_encoder(job.encoder)
    columns = ["question", "candidate", "label"]
    tables = [ParquetTable.open(path).to_table().select(columns) for path in job.tables]
    rows = pa.concat_tables(tables)
    positives = rows.filter(pc.equal(rows["label"], 1))
    questions, answers = positives["question"].to_pylist(), positives["candidate"].to_pylist()
    if len(questions) > 1:
        train_encoder(encoder, questions, answers, job.training)
    if parallel.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # Of workers that were lost after they saved it.
        save_sentence_encoder(encoder, folder)
    return len(questions)


def train_encoder(
    encoder: SentenceEncoder,
    questions: Sequence[str],
    answers: Sequence[str],
    config: TrainingConfig,
    temperature: float = 0.05,
    log_metrics: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
) -> None:
    """Trains a sentence encoder, in place.

    Args:
        encoder: The encoder, on its device.
        questions: Shape [pairs].
        answers: The answer of each question, shape [pairs].
        config: Hyperparameters; `global_batch_size` is the number of pairs of a step.
        temperature: Divides the similarities; 1 / 20 as in sentence-transformers.
        log_metrics: Called with the steps so far and the metrics of a step.

    Raises:
        ConfigError: There are fewer than two pairs, or workers cannot share a batch evenly.
        DivergedError: The loss is not finite.
    """
    batch_size = min(config.global_batch_size, len(questions))
    rank, num_workers = parallel.get_rank(), parallel.get_world_size()
    if batch_size < 2 or batch_size % num_workers:
        raise ConfigError(
            f"a batch of {batch_size} pairs for {num_workers} workers: a pair needs another one as "
            "its negative, and workers take equal shares",
            fix="give more pairs, or choose a global_batch_size that the workers divide",
        )
    texts = encoder.settings.query_prompt, encoder.settings.document_prompt
    answer_ids = np.unique(np.asarray(answers, object), return_inverse=True)[1]
    model: nn.Module = encoder if num_workers == 1 else DistributedDataParallel(encoder)
    optimizer = create_optimizer(model, config)
    device = encoder.encoder.device
    dtype = resolve_dtype(parallel.agree_on_precision(config.precision, device), device)
    steps_per_epoch = len(questions) // batch_size
    num_steps = config.epochs * steps_per_epoch
    torch.manual_seed(config.seed + rank)
    encoder.train()
    for step in range(num_steps):
        epoch, epoch_step = divmod(step, steps_per_epoch)
        if epoch_step == 0:
            order = np.random.default_rng([config.seed, epoch]).permutation(len(questions))
        rows = order[epoch_step * batch_size :][:batch_size]
        local_rows = rows[rank::num_workers]
        sequences = encoder.tokenize(
            [texts[0] + questions[row] for row in local_rows]
            + [texts[1] + answers[row] for row in local_rows]
        )
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            [batch] = pack_sequences(sequences, int(sequences.lengths.sum()))
            embeddings = functional.normalize(model(batch))
        # The batch is sorted by length.
        position = torch.from_numpy(np.argsort(batch.sequence_data["row"])).to(device)
        queries, local_answers = embeddings[position].chunk(2)
        documents = local_answers
        if num_workers > 1:
            documents = torch.cat(all_gather(local_answers))  # type: ignore[no-untyped-call]
        document_rows = np.concatenate([rows[r::num_workers] for r in range(num_workers)])
        similarities = queries @ documents.T / temperature
        # Two questions may have the same answer, which is no negative then.
        is_same = answer_ids[local_rows][:, None] == answer_ids[document_rows][None]
        is_other = local_rows[:, None] != document_rows[None]
        mask = torch.from_numpy(is_same & is_other).to(device)
        target = torch.arange(len(local_rows), device=device) + rank * len(local_rows)
        loss = functional.cross_entropy(similarities.masked_fill(mask, float("-inf")), target)
        loss.backward()  # type: ignore[no-untyped-call]
        norm: Tensor = nn.utils.clip_grad_norm_(
            model.parameters(), config.max_grad_norm or float("inf")
        )
        learning_rate = compute_learning_rate(config, (step + 1) / (num_steps + 1), num_steps + 1)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = float(parallel.all_reduce_sum(loss.detach().clone())) / num_workers
        if not np.isfinite(mean_loss):
            raise DivergedError(
                f"the loss of the sentence encoder is {mean_loss} after {step + 1} steps",
                fix="lower learning_rate, or set precision to fp32",
            )
        log_metrics(
            step + 1,
            {
                "train/loss": mean_loss,
                "train/gradient_norm": float(norm),
                "train/learning_rate": learning_rate,
            },
        )
    encoder.eval()
