"""The API families: request JSON -> `GenerationRequest`, handler, result -> response JSON."""
