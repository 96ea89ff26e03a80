"""The HTTP server, installed as `pyllama.server`: llama-server's API on top of `pyllama`. Entry: `main.py`."""
