"""Word lists that training data is written with.

``words_heldout.py`` holds the lists of the evaluation; no entry of an open class (places, people,
nouns, attributes, topics) may stand in both, which a test checks.
"""


def _split(text: str, sep: str | None = None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(sep) if word.strip())


CITIES = _split(
    """Paris, London, Berlin, Madrid, Rome, Vienna, Tokyo, Osaka, Beijing, Shanghai, Seoul, Delhi,
    Mumbai, Cairo, Lagos, Nairobi, Boston, Chicago, Dallas, Denver, Seattle, Miami, Austin, Toronto,
    Montreal, Sydney, Melbourne, Dublin, Lisbon, Porto, Oslo, Stockholm, Helsinki, Copenhagen,
    Amsterdam, Brussels, Zurich, Geneva, Milan, Naples, Venice, Athens, Istanbul, Moscow, Warsaw,
    Prague, Budapest, Munich, Hamburg, Cologne, Lyon, Nice, Bordeaux, Barcelona, Valencia, Seville,
    New York, Los Angeles, San Francisco, Las Vegas, New Orleans, Hong Kong,
    Kuala Lumpur,
    Mexico City, Rio de Janeiro, Buenos Aires, Cape Town, Tel Aviv, Abu Dhabi, Dubai, Doha, Lima,
    Bogota, Santiago, Havana, Singapore, Bangkok, Hanoi, Jakarta, Manila, Perth, Leeds, Bristol,
    Glasgow, York, Oxford, Bath, Cork, Ghent, Basel, Graz, Krakow, Riga, Vilnius, Minsk, Sofia""",
    ",",
)
COUNTRIES = _split(
    """France, Germany, Spain, Italy, Japan, China, India, Egypt, Kenya, Canada, Mexico, Brazil,
    Norway, Sweden, Finland, Poland, Greece, Turkey, Austria, Ireland, Portugal, Australia,
    USA, UK, Cuba, Iran, Nepal, South Korea, Vietnam, Morocco""",
    ",",
)
NAMES = _split(
    """Anna Ben Carla David Emma Frank Grace Henry Ivan Julia Karl Laura Mark Nina Oscar Paula Quinn
    Robert Sara Tom Ursula Victor Wendy Xavier Yara Zoe Alice Bob Carol Dan Eve Fred Gina Hugo Iris
    Jack Kate Leo Mia Noah Olga Peter Rita Sam Tina Uma Vera Will John Mary Max Lisa Paul Jane"""
)
SURNAMES = _split(
    """Smith Jones Brown Miller Davis Wilson Moore Taylor Clark Lewis Walker Hall Young King Wright
    Scott Green Baker Adams Nelson Hill Berg Klein Novak Rossi Silva Costa Meyer Weber Wagner"""
)
NOUNS = _split(
    """order ticket invoice product customer account user file folder photo song album movie book
    article recipe restaurant flight train bus car bike room table chair lamp window
    tree flower plant animal dog cat horse bird fish river lake mountain island bridge tower
    castle museum library school student teacher course lesson exam game player team match score
    race ring coin bottle glass cup plate knife fork spoon bread cheese apple pear banana orange
    lemon onion potato tomato carrot soup cake coffee tea juice milk meal menu shop store
    market bank loan card payment salary budget price tax house flat office desk printer phone
    laptop tablet camera screen battery cable router server database table_row record report
    document letter message email note task project meeting event calendar alarm timer clock
    watch sensor motor pump valve engine truck ship boat plane rocket satellite planet star
    moon galaxy comet crystal metal stone brick tile wall roof floor kitchen bathroom garage
    shirt shoe jacket coat hat glove sock dress bag box package stamp address street
    city country region state village farm field forest desert storm cloud doctor nurse patient
    hospital clinic pill vaccine bill contract policy claim lawyer court judge police member club
    band singer concert festival stage actor painter poem novel chapter page word letterhead
    sample test result model dataset token query topic channel playlist video podcast episode
    station platform gate seat passenger driver route trip tour guide map"""
)
ATTRIBUTES = _split(
    """price status size weight height length width age color owner location address name title
    balance stock level speed power temperature pressure humidity rating score rank version state
    date deadline duration distance capacity volume cost fee discount total count number type
    category language author phone email quantity limit quota mode priority progress"""
)
ADJECTIVES = _split(
    """red big small old new fast slow cold hot warm dark bright cheap rich quiet loud soft hard
    fresh sweet dry wet happy long short strong weak clean empty full green blue white black"""
)
COLORS = _split("red blue green yellow orange purple black white pink brown gray")
LANGUAGES = _split("French German Spanish Italian Japanese Chinese English Russian Polish Dutch")
CURRENCIES = _split("USD EUR GBP JPY CHF CAD AUD INR dollars euros pounds yen")
UNITS = _split("km miles meters feet inches cm kg pounds grams ounces liters gallons hours minutes")
CONDITIONS = _split("sunny cloudy rainy windy clear snowy foggy stormy")
SIZES = _split("small medium large")
LEVELS = _split("low medium high urgent normal")
DEVICES = _split("lamp heater fan radio oven tv light printer speaker camera pump")
ROOMS = _split("kitchen bedroom bathroom garage office hall basement attic garden")
TICKERS = _split("AAPL MSFT GOOG TSLA AMZN NVDA META IBM ORCL INTC SAP BMW")
GET_VERBS = _split("get, find, fetch, look up, check, show, read, query, retrieve, return", ",")
ACT_VERBS = _split(
    """create, add, delete, remove, update, book, order, send, start, stop, open, close, cancel,
    reserve, schedule, move, copy, rename, save, print, share, edit, track, register, archive, buy,
    sell, lock, enable, submit""",
    ",",
)
TASKS = _split(
    """buy {n}; call {p}; clean the {n}; pay the {n}; meet {p} at noon; water the {n}; send the {n};
    fix the {n}; read the {n}; wash the {n}; {n} for {p}; hello {p}; see you soon; call me back;
    the {n} is ready; bring the {n}; happy birthday {p}; good morning; where is the {n}; {a} {n}""",
    ";",
)
QUERIES = _split(
    """{n}; {a} {n}; {n} near {c}; best {n} in {c}; {n} {m}; {a} {n} {m}; how to fix a {n}; {c} {n};
    history of {c}; {n} for {p}; {w}; {w} {n}; {a} {w}""",
    ";",
)
SYSTEM_PROMPTS = _split(
    """You are a helpful assistant. | You are a helpful AI assistant. | Be brief. | Be concise. |
    You are moonlet-nano. | Answer briefly. | You are a friendly assistant. |
    You are an assistant with access to tools. | Use the tools when needed. |
    You are a helpful assistant that can use tools. | Answer the question. |
    You are a {a} assistant. | You work for a {n} company. | The user is called {p}. |
    You are {p}, an assistant. | Today is {date}. | Help the user with the {n}.""",
    "|",
)
