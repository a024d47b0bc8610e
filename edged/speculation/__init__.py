"""What comes next, guessed cheaply: drafts, the trees they make, and how much of them a step takes."""
