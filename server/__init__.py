"""The HTTP server: llama-server's API on top of `pyllama`. Installed as `pyllama.server`; the entry is `pyllama.server.main`."""
