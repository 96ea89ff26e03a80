"""A model with random weights answers in the form of 200 generated schemas: every answer that ends is valid.

`jsonschema` judges. An answer that the length limit cuts off proves nothing and must be rare.
"""

from __future__ import annotations

import concurrent.futures
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_server import EngineServer
from python.test_grammar import COMPILER, generate

from pyllama.grammar import GrammarSource
from support.schema_generator import SchemaGenerator

N_SCHEMAS = 200


@pytest.fixture(scope="module")
def server(tiny_llama_path: Path) -> Iterator[EngineServer]:
    server = EngineServer(tiny_llama_path, "-np", "4", "-c", "8192")
    yield server
    server.close()


def test_every_answer_of_a_random_model_is_valid(server: EngineServer) -> None:
    generator = SchemaGenerator(seed=20)
    schemas = [generator.make() for _ in range(N_SCHEMAS)]

    def answer(index: int) -> tuple[int, str, str]:
        body = {"prompt": "x", "n_predict": 1500, "temperature": 1.0, "seed": index, "json_schema": schemas[index]}
        response = server.client.post("/completion", json=body)
        assert response.status_code == 200, (response.text, schemas[index])
        found = response.json()
        return index, found["content"], found["stop_type"]

    n_cut = 0
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for index, text, stop_type in pool.map(answer, range(N_SCHEMAS)):
            if stop_type == "limit":
                n_cut += 1
                continue
            validator = jsonschema.Draft202012Validator(schemas[index])
            errors = [error.message for error in validator.iter_errors(json.loads(text))]
            assert errors == [], (text, schemas[index])
    assert n_cut <= N_SCHEMAS // 20


@pytest.mark.parametrize("seed", range(4))
def test_every_text_that_a_grammar_lets_through_is_valid(seed: int) -> None:
    """Bytes drawn evenly, which reach corners that a model does not: escapes, blanks, rare names."""
    generator, rng = SchemaGenerator(seed), random.Random(seed)
    for _ in range(15):
        schema = generator.make()
        start = COMPILER.compile(GrammarSource("json_schema", json.dumps(schema)))
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(3):
            text = generate(start, rng, most=20_000)
            errors = [error.message for error in validator.iter_errors(json.loads(text))]
            assert errors == [], (text, schema)


def test_the_judge_sees_faults() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert not jsonschema.Draft202012Validator(schema).is_valid({"a": "x"})
