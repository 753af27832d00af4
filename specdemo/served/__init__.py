"""Lanes that a server elsewhere decodes: vLLM, SGLang, llama.cpp's server, or whatever speaks OpenAI's protocol.

The same race, on an engine that outgrows one machine. Nothing here computes with a model or imports torch: a lane is
one HTTP stream, its events are made from what the server sends and when, and all else (metrics, page, traces) is what
every lane has. Only the hosts named at the start are ever asked.
"""
