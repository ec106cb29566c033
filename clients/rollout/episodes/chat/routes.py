"""Paths of the server, below ``/v1``."""

BASE = "/v1"
CHAT = "/chat/completions"
COMPLETIONS = "/completions"
MESSAGES = "/messages"
MODELS = "/models"
