"""The static budget and the KV pages inside it."""
