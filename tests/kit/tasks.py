"""Tasks for lm-eval, made for a test: samples in a file, and the YAML that reads them."""

import json
from pathlib import Path

CAPITALS = (("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Egypt", "Cairo"), ("Peru", "Lima"), ("Chad", "Oslo"))
"""The last one has a wrong answer among wrong ones."""
CHOICES = ("Paris", "Rome", "Tokyo", "Cairo", "Lima")


def write_tasks(folder: Path, data: str = "capitals.jsonl", name: str = "capitals") -> Path:
    """Write a task of multiple choice, one of whole texts and one of answers in words, and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "capitals.jsonl").open("w") as file:
        for number, (country, capital) in enumerate(CAPITALS):
            answer = CHOICES.index(capital) if capital in CHOICES else number % len(CHOICES)
            file.write(json.dumps({"country": country, "choices": CHOICES, "answer": answer}) + "\n")
    head = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {data}}}\ntest_split: test\n"
    (folder / "capitals.yaml").write_text(
        f"task: {name}\n{head}output_type: multiple_choice\n"
        'doc_to_text: "The capital of {{country}} is"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    (folder / "texts.yaml").write_text(
        f'task: texts\n{head}output_type: loglikelihood_rolling\ndoc_to_text: ""\n'
        'doc_to_target: "The capital of {{country}} is {{choices[0]}}, and that is where the river is."\n'
        "metric_list:\n  - metric: bits_per_byte\n"
    )
    (folder / "words.yaml").write_text(
        f'task: words\n{head}output_type: generate_until\ndoc_to_text: "The capital of {{{{country}}}} is"\n'
        'doc_to_target: "{{choices[answer]}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 8}\n'
        "metric_list:\n  - metric: exact_match\n"
    )
    return folder
