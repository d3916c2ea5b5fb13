"""What people read: its length, its links, its figures, its words."""
