"""A recorder of the product's answers: what a change of its insides must leave as it was."""
