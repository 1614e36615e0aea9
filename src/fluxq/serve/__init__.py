"""`fluxq serve`: checkpoints behind OpenAI's images API."""
