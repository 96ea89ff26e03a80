"""The server's application on the real engine, in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from pyllama.options import parse
from pyllama.server.app import create_app
from pyllama.server.settings import settings_from_options
from pyllama.server.state import ServerState


class EngineServer:
    """The application with a loaded model, in this process."""

    def __init__(self, model: Path, *arguments: str, build_info: str = "b1-test") -> None:
        from pyllama.server.loaded_model import load_model

        options = parse("llama-server", ["-t", "1", "-np", "2", "-c", "2048", *arguments], {}, config_files=())
        self.state = ServerState(
            settings_from_options(options, str(model), options.spec_draft_model), build_info=build_info
        )
        self.client = TestClient(create_app(self.state))
        self.client.__enter__()
        self.state.set_loaded(load_model(self.state.settings, self.state.deliver))

    def close(self) -> None:
        self.state.loaded.engine_loop.stop(10)
        self.client.__exit__(None, None, None)

    def complete(self, prompt: str | list[int], slot: int = -1, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "id_slot": slot, "n_predict": 8, "temperature": 0, "ignore_eos": True, **fields}
        return self.client.post("/completion", json=body).json()

    def metrics(self) -> dict[str, float]:
        lines = [line.split() for line in self.client.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("llamacpp:"): float(value) for name, value in lines}

    def act(self, slot: object, action: str, **body: Any) -> Any:
        return self.client.post(f"/slots/{slot}?action={action}", json=body)
