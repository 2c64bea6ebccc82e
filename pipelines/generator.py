"""Questions out of sentences by a local sequence-to-sequence model, such as a doc2query T5.

Knows transformers. Must not know documents or what the questions are for.
"""

from collections.abc import Sequence

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from as2ray.errors import CheckpointError


class QuestionGenerator:
    """Asks one question about each sentence; greedy, so always the same.

    Args:
        path: Folder or hub id of a sequence-to-sequence model.
        prompt: What comes before a sentence.
        longest: Most tokens of a question.
    """

    def __init__(self, path: str, prompt: str = "", longest: int = 32) -> None:
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            self.model = AutoModelForSeq2SeqLM.from_pretrained(path).eval()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: {str(error)[:300]}"
                "; expected a sequence-to-sequence model with its tokenizer",
                fix="check the path; offline, only local folders and cached hub ids load",
            ) from error
        self.prompt, self.longest = prompt, longest

    @torch.inference_mode()
    def __call__(self, sentences: Sequence[str]) -> list[str]:
        """A question for each sentence."""
        given = [self.prompt + sentence for sentence in sentences]
        read = self.tokenizer(given, return_tensors="pt", padding=True, truncation=True)
        asked = self.model.generate(
            input_ids=read["input_ids"],
            attention_mask=read["attention_mask"],
            max_new_tokens=self.longest,
            do_sample=False,
            num_beams=1,
        )
        questions: list[str] = self.tokenizer.batch_decode(asked, skip_special_tokens=True)
        return questions
