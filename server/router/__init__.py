"""Router mode: one server in front of many models, each served by a `llama-server` process of its own.

`catalog` knows which models there are, `presets` reads their options from a file, `pool` decides which of them run and
in which order they start, `instance` is one such process, `child` is its side of the conversation, `forward` passes
requests on, `app` has the routes, `downloads` fetches models.
"""
