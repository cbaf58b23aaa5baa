"""The commands on checkpoints: each module answers one, with an `Answer`; `arguments` declares their command lines."""
