"""Generates questions from sentences with a sequence-to-sequence model, such as doc2query."""

from collections.abc import Sequence

from as2ray.errors import CheckpointError


class QuestionGenerator:
    """Generates one question per sentence, by greedy decoding, on the first GPU if there is one.

    Args:
        path: Folder or hub id of a sequence-to-sequence model.
        prompt: Text before each sentence.
        max_question_tokens: Maximum number of tokens of a question.

    Raises:
        CheckpointError: The model or its tokenizer cannot be loaded.
    """

    def __init__(self, path: str, prompt: str = "", max_question_tokens: int = 32) -> None:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForSeq2SeqLM.from_pretrained(path).eval()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be loaded as a sequence-to-sequence model: {str(error)[:300]}",
                fix="check the path; offline, only local folders and cached hub ids load",
            ) from error
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.prompt, self.max_question_tokens = prompt, max_question_tokens

    def __call__(self, sentences: Sequence[str]) -> list[str]:
        """Returns a question for each sentence."""
        texts = [self.prompt + sentence for sentence in sentences]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        batch = batch.to(self.model.device)
        token_ids = self.model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.max_question_tokens,
            do_sample=False,
            num_beams=1,
        )
        questions: list[str] = self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return questions
