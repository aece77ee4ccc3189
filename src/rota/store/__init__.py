"""The run folder: config.toml, rounds.jsonl, summary.json, data.json, checkpoint/, models/, report.html."""

from rota.store.folder import Folder, refuse_used

__all__ = ["Folder", "refuse_used"]
