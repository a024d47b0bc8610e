"""What a draft takes of a step that has just run: the accepted tokens, where their hidden states lie, and where they stand."""
