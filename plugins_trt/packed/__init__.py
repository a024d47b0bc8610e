"""What the products with packed weights of every kind share."""
