"""Dense and sparse attention of decode and verify steps of up to 64 tokens over paged keys."""
