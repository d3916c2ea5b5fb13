"""The page at `/`: files that the gateway serves as they are."""
