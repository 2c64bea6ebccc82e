from huggingface_hub import ModelCard

from as2ray.checkpoints.model_card import write_model_card


def test_model_card_has_the_hub_s_metadata_the_use_and_all_sections(tmp_path):
    folder = tmp_path / "whales"
    folder.mkdir()
    sections = {"Results": "Good.", "Training": "Short."}
    write_model_card(folder, "some/base", {"AP": 0.75, "RR": 0.5}, "Toy test", sections)
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("as2ray", "text-ranking")
    assert card.data.tags == ["cross-encoder", "answer-sentence-selection"]
    results = [
        (
            result.task_type,
            result.dataset_type,
            result.dataset_name,
            result.metric_type,
            result.metric_value,
        )
        for result in card.data.eval_results
    ]
    assert results == [
        ("text-ranking", "table", "Toy test", name, value)
        for name, value in (("AP", 0.75), ("RR", 0.5))
    ]
    title, first, *_ = card.text.strip().split("\n\n")
    assert title == "# whales"
    assert first.endswith("Trained by as2ray from `some/base`.")
    assert 'as2ray.load("whales").rank(' in card.text
    headings = [line for line in card.text.splitlines() if line.startswith("## ")]
    assert headings == ["## Use", "## Results", "## Training"]
    assert card.text.endswith("## Results\n\nGood.\n\n## Training\n\nShort.\n")
