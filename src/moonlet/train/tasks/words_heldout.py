"""Word lists of the held-out evaluation; disjoint from ``words.py`` in every open class.

Closed classes that a user cannot vary much (units, size words, verbs of everyday requests) may
overlap; places, people, nouns, attributes, devices, tickers and topics may not.
"""

from moonlet.train.tasks.words import _split

CITIES = _split(
    """Salzburg, Turin, Bilbao, Marseille, Rotterdam, Antwerp, Gdansk, Tallinn, Bergen, Aarhus,
    Malmo, Tampere, Kyoto, Sapporo, Busan, Taipei, Chennai, Karachi, Accra, Dakar, Tunis,
    Casablanca,
    Phoenix, Houston, Portland, Atlanta, Detroit, Ottawa, Calgary, Quebec, Auckland, Brisbane,
    Adelaide, Salt Lake City, Santa Monica, Porto Alegre, Saint Paul, Ho Chi Minh City, Luxembourg,
    Reykjavik, Ljubljana, Zagreb, Belgrade, Tbilisi, Montevideo, Quito, Caracas, Edinburgh,
    Cardiff""",
    ",",
)
COUNTRIES = _split(
    "Belgium, Denmark, Croatia, Estonia, Uruguay, Ghana, Tunisia, New Zealand, Thailand, Iceland",
    ",",
)
NAMES = _split(
    """Arthur Bianca Cedric Dora Elias Felix Gustav Helena Ingrid Jonas Kira Lukas Marta Nora Otto
    Petra Ralf Simon Theo Viola Walter Amir Chloe Derek Fiona"""
)
SURNAMES = _split("Harper Fischer Kovacs Lindgren Moreau Okafor Petrov Santos Turner Vogel Yamada")
NOUNS = _split(
    """shipment voucher warehouse subscription bakery cottage ferry tram scooter helmet backpack
    violin guitar piano orchard vineyard meadow glacier volcano harbor lighthouse cathedral theater
    statue telescope microscope compass lantern candle blanket pillow mattress carpet curtain
    cucumber pumpkin mushroom pepper noodle sandwich pancake yogurt smoothie refund deposit
    mortgage pension tenant landlord elevator balcony chimney fountain keyboard headset drone
    turbine reactor antenna beacon cargo freight runway hangar pilot referee coach trophy medal
    tournament stadium gallery sculpture costume orchestra melody lyric chapel monastery"""
)
ATTRIBUTES = _split(
    """warranty brightness altitude frequency voltage latency thickness depth salinity popularity
    calories nickname birthday barcode expiry mileage occupancy severity reputation forecast"""
)
ADJECTIVES = _split("golden silver wooden gentle rapid narrow heavy smooth bitter young")
COLORS = _split("teal maroon violet turquoise beige")
LANGUAGES = _split("Swedish Portuguese Korean Turkish Greek Finnish")
CURRENCIES = _split("SEK NOK PLN BRL MXN pesos francs rupees")
UNITS = _split("yards knots acres pints stones tons centuries")
CONDITIONS = _split("hazy drizzly freezing humid overcast")
SIZES = _split("small medium large")
LEVELS = _split("minor major critical")
DEVICES = _split("kettle toaster dishwasher projector humidifier sprinkler")
ROOMS = _split("cellar nursery pantry studio lobby terrace")
TICKERS = _split("NFLX ADBE PYPL UBER SHOP QCOM SONY VW")
GET_VERBS = _split("get, find, fetch, look up, check, show, read, query, retrieve, return", ",")
ACT_VERBS = _split(
    """create, add, delete, remove, update, book, order, send, start, stop, open, close, cancel,
    reserve, schedule, move, rename, save, share, track, register, buy, sell, lock, enable""",
    ",",
)
TASKS = _split(
    """sell the {n}; visit {p} tomorrow; repair the {n}; polish the {n}; thanks a lot {p};
    pick up {p}; the {n} arrived; paint the {n} {a}; lend {p} the {n}; replace the old {n}""",
    ";",
)
QUERIES = _split(
    "{a} {n} shops; used {n}; {n} in {c}; repair of a {n}; {w} {a} {n}; {c} {n} tickets",
    ";",
)
SYSTEM_PROMPTS = _split(
    """You are a helpful assistant. | You help people with the {n}. | Be kind and brief. |
    You are a {a} helper.""",
    "|",
)
